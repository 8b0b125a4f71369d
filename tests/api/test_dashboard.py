"""The page's files, without a browser: how much they are, where they point, what can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "api/fanout_api/dashboard"
SERVED = sorted(path for path in DASHBOARD.iterdir() if path.suffix in {".js", ".css", ".svg"})
LEAST_CONTRAST = 4.5
"""Of text, by WCAG 2.2 AA."""
LEAST_SHAPE_CONTRAST = 3
"""Of what is not text and must be told apart from the ground."""
THEMES = 3
"""Light, dark, on paper."""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node, which runs the modules' tests")
def test_modules_by_node() -> None:
    """What fanout-events.js is made of, as node's own test runner sees it; and each file parses."""
    done = subprocess.run(
        ["node", "--test", "tests/browser/events.test.mjs"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"pass [1-9]", done.stdout)
    for path in DASHBOARD.glob("*.js"):
        parsed = subprocess.run(
            ["node", "--input-type=module", "--check"],
            input=path.read_bytes(), capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert parsed.returncode == 0, parsed.stderr.decode()


def test_no_file_names_another_server_or_takes_text_for_html() -> None:
    """No request to anywhere else, and text of strangers is only ever put in as text."""
    for path in [*SERVED, DASHBOARD / "index.html"]:
        text = path.read_text()
        assert set(re.findall(r"https?://[^\"'`\s)]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), path


def test_the_palette_can_be_read() -> None:
    """In light, in dark and on paper: text on every ground it stands on, and shapes on theirs."""
    palettes = _palettes((DASHBOARD / "app.css").read_text())
    assert len(palettes) == THEMES
    for palette in palettes:
        for ink in ("text", "quiet", "accent", "f", "warn"):
            for ground in ("bg", "panel", "noticed"):
                if (ink, ground) in {("f", "noticed"), ("accent", "noticed")}:
                    continue  # a notice has neither links nor failures in it
                found = _contrast(palette[ink], palette[ground])
                assert found >= LEAST_CONTRAST, (ink, ground, round(found, 2))
        assert _contrast(palette["bg"], palette["accent"]) >= LEAST_CONTRAST, "a pressed button"
        for ink in ("c", "f", "x", "r"):
            found = _contrast(palette[ink], palette["bg"])
            assert found >= LEAST_SHAPE_CONTRAST, (ink, round(found, 2))


def _palettes(css: str) -> list[dict[str, str]]:
    """The colours of each theme, over those of the first."""
    found: list[dict[str, str]] = []
    for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL):
        own = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6});", block))
        found.append({**(found[0] if found else {}), **own})
    return found


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(digit * 2 for digit in digits)
    red, green, blue = (_linear(int(digits[i : i + 2], 16) / 255) for i in (0, 2, 4))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
