"""What is shipped: three packages, one version, no address of a registry, contracts that bite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["fanout", "streaming/fanout_streaming", "api/fanout_api"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_three_packages_and_nothing_else(built: Path) -> None:
    """A top-level package named `api` would overwrite someone else's files, silently."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "fanout",
        "fanout_api",
        "fanout_streaming",
    }
    for package in ("fanout", "fanout_streaming", "fanout_api"):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    shipped = {name for name in names if name.startswith("fanout/sql/")}
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fanout" / "sql").rglob("*")
        if path.is_file()
    }
    assert shipped == in_tree


def test_the_sdist_holds_no_tests_and_nothing_of_the_workshop(built: Path) -> None:
    """What the wheel is built from, and what a reader needs."""
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert {"fanout", "streaming", "api", "LICENSE", "pyproject.toml"} <= tops
    assert not tops & {"tests", "benchmarks", ".venv", "constraints.txt", "Makefile"}


def test_the_version_stands_in_one_place() -> None:
    """Code asks the installed metadata; a second copy would be forgotten in a release."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version("pgfanout") == stated
    for path in tracked_files():
        if path.suffix == ".py":
            assert f'"{stated}"' not in path.read_text(), path


def test_constraints_pin_by_name_and_version_alone() -> None:
    """Where packages come from is the machine's affair, not the repository's."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_no_tracked_file_names_the_host_of_a_registry() -> None:
    """The same, for the whole tree."""
    # Put together here, or this file would be the one that names them.
    hosts = [
        ".".join(parts)
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("npmjs", "org"),
            ("npmjs", "com"),
            ("npmmirror", "com"),
            ("yarnpkg", "com"),
        )
    ]
    for path in tracked_files():
        content = path.read_bytes()
        for host in hosts:
            assert host.encode() not in content, f"{path.relative_to(ROOT)} names {host}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages and their contracts, to be broken."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            tmp_path / Path(package).name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        # Before the installed packages, which are those of the tree.
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_import_contracts_hold(copy: Path) -> None:
    """As they are."""
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("package", "line", "contract"),
    [
        ("fanout", "import fanout_streaming", "The API stands on the relay"),
        ("fanout", "import fanout_api", "The API stands on the relay"),
        ("fanout_streaming", "import fanout_api", "The API stands on the relay"),
        ("fanout", "import starlette", "know no web framework"),
        ("fanout_streaming", "import sse_starlette", "know no web framework"),
        ("fanout_streaming", "from uvicorn import run", "know no web framework"),
        ("fanout_api", "import asyncpg", "never touches the driver"),
    ],
)
def test_an_import_against_a_contract_is_reported(
    copy: Path, package: str, line: str, contract: str
) -> None:
    """Each contract, broken once: one that cannot be broken holds nothing."""
    (copy / package / "broken.py").write_text(f"{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1
    broken = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert any(contract in row for row in broken), result.stdout
