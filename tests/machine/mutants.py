"""Breaks the machine on purpose: `python -m tests.machine.mutants [--all] [NAME ...]`.

Says which tests turn red. Each mutant runs the tests of this folder in a process of its own, where
`conftest.py` puts it in; the product knows nothing of it. Model and race, which take longer, are
asked only if the others see nothing, or with --all. Ends with 1 if a mutant survives.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import fanout.statements
import fanout.store
from fanout.store import Store
from fanout.values import Claim, Completed, Counted, Failed

Statements = dict[str, str]
Ended = Iterable[tuple[Claim, Completed | Failed]]
QUICK: Final = ("test_matrix", "test_interleavings")
RULES: Final = ("test_batch_limits", "test_sums", "test_attempts", "test_aggregate")
LONG: Final = ("test_model", "test_race")
FILES: Final = (*QUICK, *RULES, *LONG)
ENVIRONMENT: Final = "FANOUT_TEST_MUTANT"


class Mutant(NamedTuple):
    """One break: what it does to the statements, and to the store."""

    what: str
    statements: Callable[[Statements], None] = lambda _: None
    store: Callable[[], None] = lambda: None
    asked: tuple[str, ...] = QUICK
    """The files that are asked first; the long ones only if those see nothing."""


def put_in(name: str) -> None:
    """Break it as `name` says, for the rest of this process."""
    mutant = MUTANTS[name]
    statements = dict(fanout.statements.load_statements())
    mutant.statements(statements)

    def load_statements(schema: str = "fanout") -> Mapping[str, str]:
        assert schema == "fanout"
        return statements

    for module in (fanout.statements, fanout.store):
        setattr(module, "load_statements", load_statements)  # noqa: B010 -- mypy: it is a function
    mutant.store()


def _edit(pattern: str, by: str, *names: str) -> Callable[[Statements], None]:
    """Replace `pattern` in the named statements, in all that have it if none is named."""

    def edit(statements: Statements) -> None:
        found = 0
        for name in names or list(statements):
            statements[name], count = re.subn(pattern, by, statements[name])
            found += count
        assert found, f"the code has moved on: no {pattern!r} in {names or 'any statement'}"

    return edit


def _count_in_a_second_transaction() -> None:
    finish = Store.finish

    async def finish_then_count(self: Store, ended: Ended, token: UUID) -> Counted:
        counted = await finish(self, ended, token)
        for depth in sorted({job.depth for job in counted.moved}, reverse=True):
            ids = [job.id for job in counted.moved if job.depth == depth and job.status.is_terminal]
            await self._pool.fetch(self._sql["count_up"], ids)
        return counted

    setattr(Store, "finish", finish_then_count)  # noqa: B010 -- mypy: it is a method


def _all_depths_at_once() -> None:
    def one_group(
        items: list[tuple[Claim, object]], *, key: Callable[[tuple[Claim, object]], int]
    ) -> list[tuple[int, list[tuple[Claim, object]]]]:
        return [(max(map(key, items)), items)] if items else []

    setattr(fanout.store, "groupby", one_group)  # noqa: B010 -- mypy: it is a class


_SHOUT: Final = (
    r"FROM lc WHERE lc.id = c.id AND (SELECT true FROM pg_notify('fanout', repeat('x', {})))"
)
_TO_FINISH: Final = r"FROM lc\s+WHERE lc\.id = c\.id"

MUTANTS: Final[dict[str, Mutant]] = {
    "no-attempt": Mutant(
        "finish is fenced by the token alone",
        _edit(r"c\.attempt = i\.attempt AND ", "", "finish"),
    ),
    "no-token": Mutant(
        "finish is fenced by the attempt alone",
        _edit(r"c\.claim_token = \$3", "$3::uuid IS NOT NULL", "finish"),
    ),
    "no-fence-to-fan-out": Mutant(
        "a chunk's last look at the claim is dropped",
        _edit(
            r"AND \(asked\.outside OR \(p\.attempt = mine\.attempt "
            r"AND p\.claim_token IS NOT DISTINCT FROM mine\.claim_token\)\)",
            "",
            "fan_out",
        ),
    ),
    "no-seal": Mutant(
        "a batch closes when all that is dispatched has ended, sealed or not",
        _edit(r"\(p\.status = 'waiting' OR lp\.failure IS NOT NULL\)\s+AND (p\.completed)", r"\1"),
    ),
    "rescue-by-id": Mutant(
        "rescue takes a job whatever it is by now",
        _edit(
            r"status = 'processing' AND lease_expires_at < statement_timestamp\(\) AND",
            "",
            "rescue",
        ),
    ),
    "rescue-unlocked": Mutant(
        "rescue reads a list and then updates by id",
        _edit(
            r"ORDER BY id LIMIT \$2 FOR NO KEY UPDATE SKIP LOCKED", "ORDER BY id LIMIT $2", "rescue"
        ),
    ),
    "count-outside": Mutant(
        "a child ends in one transaction and is counted in the next",
        _edit(
            r"(FROM c WHERE) (finished_at IS NOT NULL AND parent_id)", r"\1 false AND \2", "finish"
        ),
        _count_in_a_second_transaction,
    ),
    "depths-together": Mutant(
        "a manager and its child end in one statement",
        store=_all_depths_at_once,
    ),
    "no-parent-order": Mutant(
        "parents are updated as they come, not locked by id first",
        _edit(r"ORDER BY p\.id FOR NO KEY UPDATE OF p", ""),
    ),
    "no-child-order": Mutant(
        "a flush locks its children in another order than others do",
        _edit(
            r"(AS i \([^)]*\)) ORDER BY id", r"\1 ORDER BY id DESC", "finish", "retry", "release"
        ),
    ),
    "recount-unlocked": Mutant(
        "recount, give-up and reopen decide on what they read before the lock",
        _edit(r" FOR NO KEY UPDATE", "", "lock_job"),
    ),
    "give-up-blind": Mutant(
        "give-up trusts the scan",
        _edit(
            r"AND c\.updated_at[\s\S]*(\n RETURNING c\.id)",
            r"AND $2::interval IS NOT NULL\1",
            "give_up",
        ),
    ),
    "claim-paused": Mutant(
        "a claim takes what is paused",
        _edit(r" AND NOT j\.paused", "", "claim", "claim_alone", "claim_limited"),
    ),
    "kind-uncounted": Mutant(
        "a claim under limits does not count what runs of a kind",
        _edit(
            r"\(SELECT COALESCE\(sum\(r\.n\), 0\) FROM running r WHERE r\.kind = i\.kind\) AS",
            "0::bigint AS",
            "claim_limited",
        ),
        asked=("test_model",),
    ),
    "batch-uncounted": Mutant(
        "a claim under limits does not count what runs of a batch",
        _edit(r"(FROM running) (WHERE parent_id IS NOT NULL)", r"\1 \2 AND false", "claim_limited"),
        asked=("test_model",),
    ),
    "claim-beyond": Mutant(
        "an ordinary claim takes what is under a limit",
        _edit(
            r"kind = ANY \(ARRAY\(SELECT l\.kind[^)]*\)\)\)\s+AS is_limited",
            "false AS is_limited",
            "claim",
        ),
        asked=("test_model",),
    ),
    "born-outside": Mutant(
        "children of a batch with a concurrency are born outside of it",
        _edit(r"CASE WHEN mine\.concurrency IS NOT NULL THEN '#' \|\| mine\.id END, ", ""),
        asked=("test_model",),
    ),
    "pause-blind": Mutant(
        "a chunk of a pause or a resume does not ask what the root says by then",
        _edit(
            r"AND (NOT )?\(SELECT r\.paused[^)]*\)",
            "AND $1::bigint > 0",
            "pause_chunk",
            "resume_chunk",
        ),
    ),
    "add-blind": Mutant(
        "documents are added to a batch that is being ended",
        _edit(
            r"AND finished_at IS NULL AND verdict IS NULL AND pruned_at",
            "AND finished_at IS NULL AND pruned_at",
            "add_children",
        ),
    ),
    "late-blind": Mutant(
        "a deadline ends what has time left",
        _edit(r"AND deadline <= statement_timestamp\(\) ", "", "doom_late"),
    ),
    "no-follow-up": Mutant(
        "the last child closes the batch and forgets its follow-up",
        _edit(r"(FROM p WHERE) (finished_at IS NOT NULL\s+UNION)", r"\1 false AND \2"),
    ),
    "no-fail-after": Mutant(
        "a child that fails counts, and nobody looks at fail_after",
        _edit(
            r"(p\.failed \+ n\.failed, p\.total, p\.status = 'waiting'), p\.fail_after,",
            r"\1, NULL,",
        ),
        asked=("test_batch_limits",),
    ),
    "no-percent-at-the-seal": Mutant(
        "the seal does not look at the share of failures",
        _edit(r"c\.total, true, c\.fail_after, c\.fail_after_percent", "c.total, true, NULL, NULL"),
        asked=("test_batch_limits",),
    ),
    "aggregate-counted": Mutant(
        "children count themselves on a batch that a sweep counts",
        _edit(r"WHERE p\.closing IS NULL\s+(ORDER BY p\.id)", r"\1"),
        asked=("test_aggregate",),
    ),
    "sums-twice": Mutant(
        "what was counted before a child was opened again is counted again",
        _edit(r" - COALESCE\(\(c\.told_sums ->> e\.key\)::numeric, 0\)", ""),
        asked=("test_sums",),
    ),
    "sums-of-the-last": Mutant(
        "what an attempt added replaces what those before it had",
        _edit(r"fanout\.add_sums\(c\.sums, lc\.added::jsonb\)", "lc.added::jsonb"),
        asked=("test_sums",),
    ),
    "no-attempt-kept": Mutant(
        "a retry forgets the attempt",
        _edit(r"(FROM lc) (ON CONFLICT DO NOTHING)", r"\1 WHERE false \2", "retry"),
        asked=("test_attempts",),
    ),
    "notify-long": Mutant(
        "NOTIFY inside the finish, with a line of 9,000 bytes",
        _edit(_TO_FINISH, _SHOUT.format(9000), "finish"),
    ),
    "notify-short": Mutant(
        "NOTIFY inside the finish, with a short line",
        _edit(_TO_FINISH, _SHOUT.format(10), "finish"),
    ),
}


def _failures(name: str, file: str, *, most: int) -> list[str]:
    """The tests of `file` that are red with the mutant in; it stops at `most`, for some hang."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-m", "not chaos"]
    command += ["-p", "no:cacheprovider", "--timeout=100", f"--maxfail={most}"]
    command += [str(here / f"{file}.py")]
    done = subprocess.run(
        command,
        env=os.environ | {ENVIRONMENT: name},
        cwd=here.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}, {file}: {done.stdout}{done.stderr}")
    red = re.findall(r"^(?:FAILED|ERROR) \S+::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return list(dict.fromkeys(red))


def _red(name: str, *, everywhere: bool) -> dict[str, list[str]]:
    red: dict[str, list[str]] = {}
    for file in FILES:
        last_resort = file in LONG and not any(red.values())
        if everywhere or file in MUTANTS[name].asked or last_resort:
            red[file] = _failures(name, file, most=0 if everywhere else 3)
    return red


def main(arguments: list[str]) -> int:
    """Run the named mutants, or all, and print a table."""
    names = [argument for argument in arguments if argument != "--all"] or list(MUTANTS)
    survivors = []
    print("| mutant | " + " | ".join(FILES) + " | s | caught first by |")
    print("|---|" + "---|" * (len(FILES) + 2))
    for name in names:
        began = time.monotonic()
        red = _red(name, everywhere="--all" in arguments)
        first = next((tests[0] for tests in red.values() if tests), "nobody: it survives")
        counts = " | ".join(str(len(red[file])) if file in red else "" for file in FILES)
        took = time.monotonic() - began
        print(f"| {name}: {MUTANTS[name].what} | {counts} | {took:.0f} | {first} |", flush=True)
        survivors += [] if any(red.values()) else [name]
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
