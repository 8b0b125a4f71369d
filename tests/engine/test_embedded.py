"""The embedded server outlives every holder but the last, however they end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from fanout import embedded

HOLDER = """
import os, sys
from pathlib import Path
from fanout import embedded
home, version_bin = sys.argv[1:]
bin = Path(version_bin) if version_bin else None
server = embedded.acquire(Path(home), version_bin=bin, options={"fsync": "off"})
print((server.data_dir / "postmaster.pid").read_text().splitlines()[0], flush=True)
sys.stdin.read()  # until the test closes it, or ends
"""

Acquire = Callable[[Path], embedded.EmbeddedServer]


class Holder:
    """A process that holds the server of a home."""

    def __init__(self, home: Path, version_bin: Path | None, user: int | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(home), str(version_bin or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )

    def server_pid(self) -> int:
        """The postmaster's pid, once it holds it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        return int(line)

    def end(self, how: signal.Signals | None = None) -> None:
        """End it by a signal, or in peace."""
        if how is not None:
            self.process.send_signal(how)
        self.process.communicate()


@pytest.fixture
def home(folder: Path) -> Iterator[Path]:
    """A home without a server, and without one afterwards."""
    path = folder / "pg"
    yield path
    if path.exists():
        wait_for_stop(path)


@pytest.fixture
def hold(home: Path, version_bin: Path | None) -> Iterator[Callable[[], Holder]]:
    holders: list[Holder] = []

    def start() -> Holder:
        holders.append(Holder(home, version_bin))
        return holders[-1]

    yield start
    for holder in holders:
        holder.end(signal.SIGKILL)


@pytest.fixture
def acquire(version_bin: Path | None) -> Acquire:
    return lambda home: embedded.acquire(home, version_bin=version_bin, options={"fsync": "off"})


def wait_for_stop(home: Path) -> None:
    """Return when the keeper has stopped the server; the kernel says so by its lock."""
    with (home / "keeper.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def server_pid(home: Path) -> int | None:
    try:
        return int((home / "data" / "postmaster.pid").read_text().splitlines()[0])
    except FileNotFoundError:
        return None


def keepers(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-3:-1] == ["keep", str(home)]:
                found.append(process)
    return found


async def one(dsn: str, sql: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


def test_two_processes_share_a_server_that_stops_with_the_last(
    home: Path, hold: Callable[[], Holder]
) -> None:
    """The first to leave does not take it from the second; after the second it is gone."""
    first, second = hold(), hold()
    pid = first.server_pid()
    assert second.server_pid() == pid

    first.end()
    held = embedded.find(home)
    assert held is not None
    held.release()
    assert server_pid(home) == pid

    second.end()
    wait_for_stop(home)
    assert server_pid(home) is None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_holder_that_is_killed_does_not_keep_the_server(
    home: Path, hold: Callable[[], Holder], how: signal.Signals
) -> None:
    """The kernel lets go for it."""
    holder = hold()
    holder.server_pid()

    holder.end(how)

    wait_for_stop(home)
    assert server_pid(home) is None


def test_a_server_without_its_keeper_is_adopted(
    home: Path, hold: Callable[[], Holder], acquire: Acquire
) -> None:
    """Keeper and holder both killed: the server runs on, the next holder brings a new keeper."""
    holder = hold()
    pid = holder.server_pid()
    [keeper] = keepers(home)
    keeper.kill()
    wait_for_stop(home)  # the keeper's end; nobody stopped the server
    holder.end(signal.SIGKILL)

    with acquire(home):
        assert server_pid(home) == pid
        assert len(keepers(home)) == 1

    wait_for_stop(home)
    assert server_pid(home) is None


def test_processes_that_start_it_first_at_once_make_one_cluster(
    home: Path, hold: Callable[[], Holder]
) -> None:
    """One initdb, one server, one keeper, nothing half made left over."""
    holders = [hold() for _ in range(6)]

    assert len({holder.server_pid() for holder in holders}) == 1

    assert len(keepers(home)) == 1
    assert not list(home.glob("data.new-*"))


def test_a_first_start_killed_at_any_moment_is_in_nobodys_way(
    home: Path, hold: Callable[[], Holder], acquire: Acquire
) -> None:
    """Whatever a killed start left under way or half made, the next start copes with it."""
    for _ in range(6):
        holder = hold()
        time.sleep(random.uniform(0.1, 1.2))  # the moment of the kill is what is randomised
        holder.end(signal.SIGKILL)

    with acquire(home) as server:
        assert server_pid(home) is not None
        server.restart()

    wait_for_stop(home)
    assert server_pid(home) is None


async def test_find_attaches_to_what_runs_and_starts_nothing(home: Path, acquire: Acquire) -> None:
    """None where there is no home, and where its server is stopped; else a holder like others."""
    assert embedded.find(home) is None
    assert not home.exists()

    started = acquire(home)
    found = embedded.find(home)
    assert found is not None
    assert found.dsn() == started.dsn()
    started.release()
    assert await one(found.dsn(), "SELECT current_database()") == "fanout"

    found.release()
    wait_for_stop(home)
    assert embedded.find(home) is None
    assert server_pid(home) is None


async def test_a_home_too_deep_for_a_socket_gets_one_elsewhere(
    folder: Path, acquire: Acquire
) -> None:
    """The folder of the socket stays private, and every process finds it."""
    home = folder / ("deep" * 30) / "pg"
    with acquire(home) as server:
        socket_dir = server.cluster.socket_dir
        assert home not in socket_dir.parents
        assert socket_dir.stat().st_mode & 0o777 == 0o700
        assert await one(server.dsn(), "SELECT 1") == 1
        found = embedded.find(home)
        assert found is not None
        found.release()
    wait_for_stop(home)
    socket_dir.rmdir()


async def test_data_survives_stops_crashes_and_new_holders(home: Path, acquire: Acquire) -> None:
    """What was committed is there after a crash and after the last holder left."""
    with acquire(home) as server:
        await one(server.dsn(), "CREATE TABLE kept AS SELECT 42 AS n")
        server.restart("immediate")
        assert await one(server.dsn(), "SELECT n FROM kept") == 42
    wait_for_stop(home)
    with acquire(home) as server:
        assert await one(server.dsn(), "SELECT n FROM kept") == 42


async def test_the_database_is_made_again_when_it_was_dropped(home: Path, acquire: Acquire) -> None:
    """Dropping it is how one starts afresh."""
    with acquire(home) as server:
        await one(server.dsn("postgres"), "DROP DATABASE fanout")
        with acquire(home) as again:
            assert await one(again.dsn(), "SELECT current_database()") == "fanout"


async def test_it_listens_on_no_network_and_is_durable_unless_told_otherwise(
    home: Path, version_bin: Path | None
) -> None:
    """Defaults that someone's data may rest on; the caller's PG* variables change none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGPORT", "1")
        with embedded.acquire(home, version_bin=version_bin, options={"work_mem": "5MB"}) as server:
            dsn = server.dsn()
            assert await one(dsn, "SHOW listen_addresses") == ""
            assert await one(dsn, "SHOW fsync") == "on"
            assert await one(dsn, "SHOW synchronous_commit") == "on"
            assert await one(dsn, "SHOW work_mem") == "5MB"
            assert await one(dsn, "SHOW server_encoding") == "UTF8"
            assert server.cluster.socket_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", ["", "{pid}\n", "{pid}\n/else\n1\n5432\n", "nonsense\n"])
def test_what_a_dead_server_left_in_its_pid_file_is_in_nobodys_way(
    home: Path, acquire: Acquire, content: str
) -> None:
    """Half written, empty, or the number of a program that lives by now: it starts."""
    acquire(home).release()
    wait_for_stop(home)
    owner = (home / "data").stat()
    remnant = home / "data" / "postmaster.pid"
    remnant.write_text(content.format(pid=os.getpid()))
    os.chown(remnant, owner.st_uid, owner.st_gid)

    with acquire(home):
        assert server_pid(home) not in (None, os.getpid())


def test_a_failed_start_says_what_the_server_said(home: Path, version_bin: Path | None) -> None:
    """The error carries the tail of the log, and nothing is held afterwards."""
    with pytest.raises(embedded.EmbeddedPostgresError, match="shared_buffers"):
        embedded.acquire(home, version_bin=version_bin, options={"shared_buffers": "much"})
    assert embedded.find(home) is None


def test_an_option_that_is_none_is_refused_by_name(home: Path, version_bin: Path | None) -> None:
    """Before anything is made."""
    with pytest.raises(embedded.EmbeddedPostgresError, match="'fsync; rm'"):
        embedded.acquire(home, version_bin=version_bin, options={"fsync; rm": "off"})
    assert not home.exists()


def test_without_the_wheel_the_error_names_the_remedy(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to install, and the other way out."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(embedded.EmbeddedPostgresError, match=r'pip install "pgfanout\[embedded\]"'):
        embedded.acquire(home)


def test_the_home_is_per_user_and_per_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable moves it; data of one major version never meets another's server."""
    monkeypatch.delenv("FANOUT_EMBEDDED_HOME", raising=False)
    assert embedded.default_home().name == "18"
    monkeypatch.setenv("FANOUT_EMBEDDED_HOME", "/elsewhere")
    assert embedded.default_home() == Path("/elsewhere/18")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="about running as root")


@needs_root
def test_as_root_a_home_the_server_cannot_enter_is_an_error_that_names_it(
    folder: Path, acquire: Acquire
) -> None:
    """And its mode stays what it was: it may be somebody's home folder."""
    closed = folder / "closed"
    closed.mkdir(0o700)
    with pytest.raises(embedded.EmbeddedPostgresError, match=str(closed)):
        acquire(closed / "pg")
    assert closed.stat().st_mode & 0o777 == 0o700


@needs_root
def test_as_root_programs_in_a_closed_folder_are_copied(
    folder: Path, home: Path, version_bin: Path | None
) -> None:
    """A virtual environment below /root works, and /root stays closed."""
    bin_dir = version_bin or embedded._wheel_bin()
    closed = folder / "closed"
    closed.mkdir(0o700)
    package = bin_dir.parent.parent
    shutil.copytree(package, closed / package.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, closed / libraries.name)
    closed_bin = closed / package.name / bin_dir.parent.name / "bin"

    for _ in range(2):
        with embedded.acquire(home, version_bin=closed_bin, options={"fsync": "off"}):
            assert len(list(home.glob("install-*"))) == 1
        wait_for_stop(home)

    assert closed.stat().st_mode & 0o777 == 0o700


@needs_root
def test_an_ordinary_user_runs_it_as_themselves(folder: Path, version_bin: Path | None) -> None:
    """No other account is needed."""
    nobody = pwd.getpwnam("nobody")
    if embedded._closed_to(nobody, Path(sys.executable).resolve().parent):
        pytest.skip("the environment of the tests is closed to other users")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    holder = Holder(folder / "pg", version_bin, user=nobody.pw_uid)
    try:
        assert psutil.Process(holder.server_pid()).uids().effective == nobody.pw_uid
    finally:
        holder.end()
    wait_for_stop(folder / "pg")
