"""What the audit of `perdure demo` measures and finds, in files made for it and in a real library."""

from __future__ import annotations

import codecs
import multiprocessing
import os
import random
import sysconfig
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from perdure.queues.errors import PerdureError
from perdure.worker.cli.demo.audit import audit_file
from perdure.worker.cli.demo.folder import UnusableFolder, list_files
from perdure.worker.cli.demo.models import LISTED_PER_KIND, RANKED, UNREAD, FileAudit, FindingKind
from perdure.worker.cli.demo.report import render, summarise
from pydantic import ValidationError

STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def write(root: Path, source: str | bytes, path: str = "sample.py") -> str:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source if isinstance(source, bytes) else textwrap.dedent(source).encode())
    return path


def audit(root: Path, source: str | bytes, path: str = "sample.py") -> FileAudit:
    return audit_file(str(root), write(root, source, path))


def found(audited: FileAudit, kind: FindingKind) -> list[tuple[int, str]]:
    return [(finding.line, finding.detail) for finding in audited.findings if finding.kind is kind]


def complexity(root: Path, body: str) -> int:
    (function,) = audit(root, "def f(a, b, c):\n" + textwrap.indent(textwrap.dedent(body), "    ")).longest
    return function.complexity


class TestListing:
    def test_names_python_files_sorted_and_relative(self, tmp_path: Path) -> None:
        for path in ("b.py", "a/z.py", "a/deep/er/x.py", "tests/test_a.py", "notes.txt", "a/module.pyc"):
            write(tmp_path, "", path)
        assert list_files(str(tmp_path)) == ["a/deep/er/x.py", "a/z.py", "b.py", "tests/test_a.py"]

    def test_skips_what_is_hidden_cached_or_installed(self, tmp_path: Path) -> None:
        for folder in (".git", ".venv/lib", "__pycache__", "lib/site-packages/pkg", "kept"):
            write(tmp_path, "", f"{folder}/module.py")
        assert list_files(str(tmp_path)) == ["kept/module.py"]

    def test_a_hidden_root_is_listed_all_the_same(self, tmp_path: Path) -> None:
        write(tmp_path, "", ".checkout/module.py")
        assert list_files(str(tmp_path / ".checkout")) == ["module.py"]

    def test_links_in_circles_end(self, tmp_path: Path) -> None:
        write(tmp_path, "", "package/module.py")
        (tmp_path / "package" / "again").symlink_to(tmp_path)
        (tmp_path / "itself.py").symlink_to("itself.py")
        (tmp_path / "nowhere.py").symlink_to("gone.py")
        (tmp_path / "linked.py").symlink_to("package/module.py")
        assert list_files(str(tmp_path)) == ["linked.py", "package/module.py"]

    def test_only_files_are_files(self, tmp_path: Path) -> None:
        (tmp_path / "folder.py").mkdir()
        os.mkfifo(tmp_path / "pipe.py")
        assert list_files(str(tmp_path)) == []

    def test_a_name_that_json_cannot_carry_is_left_out(self, tmp_path: Path) -> None:
        write(tmp_path, "", "größe.py")
        try:
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).touch()
        except OSError:
            pytest.skip("this file system takes UTF-8 names only")
        assert list_files(str(tmp_path)) == ["größe.py"]

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 10])
    def test_a_limit_spreads_evenly(self, tmp_path: Path, limit: int) -> None:
        everything = [write(tmp_path, "", f"m{number}.py") for number in range(10)]
        chosen = list_files(str(tmp_path), limit)
        places = [everything.index(path) for path in chosen]
        gaps = {after - before for before, after in zip(places, [*places[1:], 10], strict=True)}
        assert len(chosen) == limit
        assert places[0] == 0
        assert max(gaps) - min(gaps) <= 1
        assert chosen == list_files(str(tmp_path), limit)

    def test_a_limit_beyond_the_files_takes_all(self, tmp_path: Path) -> None:
        write(tmp_path, "", "only.py")
        assert list_files(str(tmp_path), 5) == ["only.py"]

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_below_one_is_refused(self, tmp_path: Path, limit: int) -> None:
        with pytest.raises(ValueError, match="at least one file"):
            list_files(str(tmp_path), limit)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("missing", "does not exist"), ("file.py", "is a file"), ("nul\0", "cannot be read")],
    )
    def test_what_is_no_folder_is_refused_with_a_remedy(self, tmp_path: Path, name: str, reason: str) -> None:
        write(tmp_path, "", "file.py")
        root = str(tmp_path / name)
        with pytest.raises(UnusableFolder, match=f"{reason}.*: name a folder that holds") as refusal:
            list_files(root)
        assert isinstance(refusal.value, PerdureError)
        assert isinstance(refusal.value, ValueError)
        assert refusal.value.root == root


class TestMeasures:
    def test_an_empty_file_has_nothing_to_find(self, tmp_path: Path) -> None:
        assert audit(tmp_path, "") == FileAudit(path="sample.py", bytes=0, lines=0)

    @pytest.mark.parametrize("source", [b"a = 1\nb = 2\nc = 3", b"a = 1\r\nb = 2\r\nc = 3\r\n", b"a=1\rb=2\rc=3"])
    def test_lines_and_bytes(self, tmp_path: Path, source: bytes) -> None:
        audited = audit(tmp_path, source)
        assert (audited.lines, audited.bytes) == (3, len(source))

    def test_functions_are_counted_and_ranked_by_length(self, tmp_path: Path) -> None:
        audited = audit(
            tmp_path,
            """\
            @decorator
            def short(): pass
            class Basket:
                async def add(self):
                    def inner():
                        pass
                    return inner
            """,
        )
        assert audited.functions == 3
        assert [(f.name, f.line, f.lines) for f in audited.longest] == [
            ("Basket.add", 4, 4),
            ("Basket.add.inner", 5, 2),
            ("short", 2, 1),
        ]

    def test_only_the_first_of_a_ranking_are_kept(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, "\n".join(f"def f{n}():\n" + "    x = a and b\n" * n for n in range(1, 31)))
        assert audited.functions == 30
        assert [f.name for f in audited.longest] == [f"f{n}" for n in range(30, 30 - RANKED, -1)]
        assert [f.complexity for f in audited.most_complex] == list(range(31, 31 - RANKED, -1))

    @pytest.mark.parametrize(
        ("expected", "body"),
        [
            (1, "return a"),
            (2, "if a: pass"),
            (2, "if a: pass\nelse: pass"),
            (3, "if a: pass\nelif b: pass\nelse: pass"),
            (4, "if a and b or c: pass"),
            (3, "return a and b and c"),
            (2, "return a if b else c"),
            (2, "for x in a: pass\nelse: pass"),
            (2, "while a: pass"),
            (3, "try: pass\nexcept A: pass\nexcept B: pass\nelse: pass\nfinally: pass"),
            (2, "try: pass\nexcept* A: pass"),
            (2, "assert a"),
            (1, "with a: pass"),
            (3, "return [x for x in a if x]"),
            (3, "return {x: y for x in a for y in b}"),
            (3, "match a:\n    case 1: pass\n    case 2: pass\n    case _: pass"),
            (2, "match a:\n    case x if x: pass"),
            (2, "return lambda: a or b"),
            (2, "class Inner:\n    if a: pass"),
            (2, 'return f"{a or b}"'),
        ],
    )
    def test_complexity_counts_decisions(self, tmp_path: Path, expected: int, body: str) -> None:
        assert complexity(tmp_path, body) == expected

    def test_asynchronous_loops_count_as_loops(self, tmp_path: Path) -> None:
        (function,) = audit(tmp_path, "async def f():\n    async for x in y:\n        pass").longest
        assert (function.complexity, function.nesting) == (2, 1)

    def test_an_inner_function_keeps_its_complexity_to_itself(self, tmp_path: Path) -> None:
        audited = audit(
            tmp_path,
            """\
            def outer(a):
                def inner(b=a or 1):
                    if b: pass
                    if b: pass
                return inner
            """,
        )
        assert {f.name: f.complexity for f in audited.longest} == {"outer": 2, "outer.inner": 3}

    @pytest.mark.parametrize(
        ("expected", "body"),
        [
            (0, "return a"),
            (1, "if a: pass\nelif b: pass\nelif c: pass"),
            (2, "if a: pass\nelse:\n    if b: pass"),
            (2, "if a: pass\nelif b:\n    with c: pass"),
            (2, "try: pass\nexcept A:\n    for x in a: pass"),
            (2, "match a:\n    case 1:\n        while a: pass"),
            (1, "if a:\n    def inner():\n        pass"),
        ],
    )
    def test_nesting_counts_blocks_within_blocks(self, tmp_path: Path, expected: int, body: str) -> None:
        audited = audit(tmp_path, "def f(a, b, c):\n" + textwrap.indent(body, "    "))
        assert audited.deepest is not None
        assert (audited.deepest.name, audited.deepest.nesting) == ("f", expected)

    def test_a_chain_longer_than_the_stack_is_walked(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, "def f(a):\n    if a: pass\n" + "    elif a: pass\n" * 900)
        assert audited.most_complex[0].complexity == 902
        assert audited.most_complex[0].nesting == 1

    def test_results_are_frozen_and_travel_as_json(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, "def f(a=[]):\n    try: pass\n    except: pass\n")
        assert FileAudit.model_validate_json(audited.model_dump_json()) == audited
        with pytest.raises(ValidationError, match="frozen"):
            audited.lines = 0


class TestFindings:
    def test_bare_excepts(self, tmp_path: Path) -> None:
        audited = audit(
            tmp_path,
            """\
            try: pass
            except: pass
            class Reader:
                def close(self):
                    try: pass
                    except OSError: pass
                    except:
                        undo()
                        raise
            """,
        )
        assert found(audited, FindingKind.BARE_EXCEPT) == [
            (2, "in the module"),
            (7, "in Reader.close, raises again"),
        ]

    @pytest.mark.parametrize(
        ("default", "shown"),
        [
            ("[]", "[]"),
            ("[1, 2]", "[...]"),
            ("{}", "{}"),
            ("{1: 2}", "{...}"),
            ("{1}", "{...}"),
            ("[x for x in y]", "[... for ...]"),
            ("{x for x in y}", "{... for ...}"),
            ("{x: x for x in y}", "{... for ...}"),
            ("list()", "list()"),
            ("dict(a=1)", "dict(...)"),
            ("set()", "set()"),
            ("bytearray(3)", "bytearray(...)"),
            ("collections.deque()", "collections.deque()"),
            ("cs.OrderedDict()", "cs.OrderedDict()"),
            ("defaultdict(list)", "defaultdict(...)"),
            ("Tally()", "Tally()"),
        ],
    )
    def test_mutable_defaults(self, tmp_path: Path, default: str, shown: str) -> None:
        imports = "import collections, collections as cs\nfrom collections import defaultdict, Counter as Tally\n"
        for signature in (f"a, b={default}", f"a, b={default}, /", f"*a, c, b={default}"):
            audited = audit(tmp_path, f"{imports}def f({signature}): pass")
            assert found(audited, FindingKind.MUTABLE_DEFAULT) == [(3, f"f(b={shown})")]
        audited = audit(tmp_path, f"{imports}\nf = lambda b={default}: b")
        assert found(audited, FindingKind.MUTABLE_DEFAULT) == [(4, f"<lambda>(b={shown})")]

    @pytest.mark.parametrize(
        "default",
        [
            "None",
            "()",
            "(1, 2)",
            "'text'",
            "frozenset()",
            "tuple([])",
            "deque()",
            "own.list()",
            "f()()",
            "name",
        ],
    )
    def test_other_defaults_are_left_alone(self, tmp_path: Path, default: str) -> None:
        source = f"from .collections import deque\ndef f(a, b={default}, *, c, d={default}): pass"
        assert found(audit(tmp_path, source), FindingKind.MUTABLE_DEFAULT) == []

    def test_an_import_counts_wherever_it_stands(self, tmp_path: Path) -> None:
        source = "def f(a=deque()): pass\nif True:\n    from collections import deque"
        assert found(audit(tmp_path, source), FindingKind.MUTABLE_DEFAULT) == [(1, "f(a=deque())")]

    def test_missing_docstrings_of_what_is_public(self, tmp_path: Path) -> None:
        audited = audit(
            tmp_path,
            '''\
            import os
            class Shown:
                def method(self): pass
                def told(self):
                    """Says what it does."""
                    def inside(): pass
                def _own(self): pass
                def __len__(self): pass
                @property
                def size(self): "The size."
                @size.setter
                def size(self, value): pass
                class Part: pass
            class _Hidden:
                def method(self): pass
            @typing.overload
            def f(a: int): ...
            if os.name:
                def f(a):
                    """  """
            ''',
        )
        assert found(audited, FindingKind.MISSING_DOCSTRING) == [
            (1, "module"),
            (2, "class Shown"),
            (3, "function Shown.method"),
            (13, "class Shown.Part"),
            (19, "function f"),
        ]
        assert audited.public == 7

    @pytest.mark.parametrize(
        ("path", "public"),
        [("a.py", 2), ("a/__init__.py", 2), ("_a.py", 0), ("_a/b.py", 0), ("a/__main__.py", 2)],
    )
    def test_a_private_module_owes_no_docstrings(self, tmp_path: Path, path: str, public: int) -> None:
        assert audit(tmp_path, "def f(): pass", path).public == public

    def test_findings_stand_in_the_order_of_their_lines(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, "def f(a=[]): pass\ntry: pass\nexcept: pass\ndef g(a={}): pass\n")
        assert [finding.line for finding in audited.findings] == [1, 1, 1, 3, 4, 4]

    def test_each_list_is_cut_and_each_count_complete(self, tmp_path: Path) -> None:
        functions = 3 * LISTED_PER_KIND
        audited = audit(
            tmp_path,
            "\n".join(f"def f{n}(a=[]):\n  try: pass\n  except: pass" for n in range(functions)),
        )
        kinds = (FindingKind.BARE_EXCEPT, FindingKind.MUTABLE_DEFAULT, FindingKind.MISSING_DOCSTRING)
        assert audited.counts == dict(zip(kinds, (functions, functions, functions + 1), strict=True))
        assert [len(found(audited, kind)) for kind in kinds] == [LISTED_PER_KIND] * 3

    def test_names_without_end_are_shortened(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, "def " + "f" * 100_000 + "(a=[]): pass")
        assert len(audited.model_dump_json()) < 2_000


class TestUnread:
    def only_finding(self, audited: FileAudit) -> tuple[FindingKind, int, str]:
        (finding,) = audited.findings
        assert audited.counts == {finding.kind: 1}
        assert (audited.functions, audited.public, audited.deepest) == (0, 0, None)
        return finding.kind, finding.line, finding.detail

    def test_syntax_error(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, "a = 1\ndef f(:\n")
        kind, line, detail = self.only_finding(audited)
        assert (kind, line) == (FindingKind.SYNTAX_ERROR, 2)
        assert detail
        assert audited.lines == 2

    def test_null_bytes(self, tmp_path: Path) -> None:
        kind, _, detail = self.only_finding(audit(tmp_path, b"a = 1\0\n"))
        assert kind is FindingKind.SYNTAX_ERROR
        assert "null bytes" in detail

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        audited = audit(tmp_path, b"# one\n# two\n# three \xff\n")
        assert self.only_finding(audited) == (
            FindingKind.UNDECODABLE,
            3,
            "not utf-8: invalid start byte (0xff)",
        )

    @pytest.mark.parametrize(
        "source",
        [
            b"# coding: no-such-codec\n",
            b"# coding: rot13\n",
            b"# coding: undefined\n",
            b"# coding: utf-16\na = 1\n",
            b"# coding: punycode\n\xff",
            b"\xff\xfea\0",
            codecs.BOM_UTF8 + b"# coding: latin-1\n",
            b"a = '\xe4'\n",
        ],
    )
    def test_a_declaration_that_misleads(self, tmp_path: Path, source: bytes) -> None:
        kind, _, detail = self.only_finding(audit(tmp_path, source))
        assert kind is FindingKind.UNDECODABLE
        assert detail

    def test_text_with_surrogates(self, tmp_path: Path) -> None:
        kind, _, _ = self.only_finding(audit(tmp_path, b"# coding: raw_unicode_escape\na = '\\ud800'\n"))
        assert kind is FindingKind.SYNTAX_ERROR

    @pytest.mark.parametrize(
        "source",
        [
            "größe = 'ä'\n".encode(),
            codecs.BOM_UTF8 + "größe = 'ä'\n".encode(),
            "# -*- coding: latin-1 -*-\ngröße = 'ä'\n".encode("latin-1"),
            "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\ngröße = '€'\n".encode("cp1252"),
            "# coding: euc-jp\nx = '日本語'\n".encode("euc-jp"),
        ],
    )
    def test_declared_encodings_are_followed(self, tmp_path: Path, source: bytes) -> None:
        assert audit(tmp_path, source).counts == {FindingKind.MISSING_DOCSTRING: 1}

    @pytest.mark.parametrize(
        "source",
        ["-" * 100_000 + "1", "a" + ".a" * 100_000, " + ".join(["a"] * 100_000), "a" + "()" * 100_000],
        ids=["signs", "attributes", "sum", "calls"],
    )
    def test_nesting_beyond_the_parser(self, tmp_path: Path, source: str) -> None:
        kind, line, _ = self.only_finding(audit(tmp_path, source))
        assert (kind, line) == (FindingKind.TOO_DEEP, 1)

    @pytest.mark.parametrize("depth", [10, 50, 90, 150, 250, 500, 900, 1_500, 2_500, 5_000])
    def test_no_depth_is_an_exception(self, tmp_path: Path, depth: int) -> None:
        for opening, closing in (("(", ")"), ("[", "]"), ("-", ""), ("lambda: ", ""), ("a if b else ", "")):
            audit(tmp_path, "x = " + opening * depth + "1" + closing * depth)
        audit(tmp_path, "".join(f"{' ' * level}if a:\n" for level in range(min(depth, 250))))

    def test_a_file_that_is_gone(self, tmp_path: Path) -> None:
        audited = audit_file(str(tmp_path), "gone.py")
        assert self.only_finding(audited) == (FindingKind.UNREADABLE, 1, os.strerror(2))
        assert str(tmp_path) not in audited.model_dump_json()


class TestWarnings:
    SOURCE = "'\\d'\n1 is 1\nassert (1, 2)\n"

    def test_warnings_about_the_code_stay_inside(self, tmp_path: Path) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not any(kind in UNREAD for kind in audit(tmp_path, self.SOURCE).counts)
            audit(tmp_path, "# coding: unicode_escape\n'\\d'\n")
        assert caught == []

    def test_threads_leave_the_filters_as_they_were(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.SOURCE * 200)
        before = list(warnings.filters)
        with ThreadPoolExecutor(8) as threads:
            audits = set(threads.map(lambda _: audit_file(str(tmp_path), path).model_dump_json(), range(64)))
        assert len(audits) == 1
        assert summarise([FileAudit.model_validate_json(audits.pop())]).findings[FindingKind.SYNTAX_ERROR] == 0
        assert list(warnings.filters) == before


@pytest.fixture
def audits(tmp_path: Path) -> list[FileAudit]:
    sources = {
        "src/shop/__init__.py": '"""The shop."""\n',
        "src/shop/basket.py": "def add(item, items=[]):\n    if item: items.append(item)\n    return items\n",
        "src/shop/till/cash.py": '"""Cash."""\ntry: import coins\nexcept: coins = None\n',
        "src/shop/till/old.py": "print 'no'\n",
        "src/shop/_own/x.py": "def f(): pass\n",
    }
    return [audit(tmp_path, source, path) for path, source in sources.items()]


class TestReport:
    def test_the_summary_adds_up(self, audits: list[FileAudit]) -> None:
        summary = summarise(audits)
        assert (summary.files, summary.lines, summary.functions, summary.public) == (5, 9, 2, 4)
        assert summary.bytes == sum(audited.bytes for audited in audits)
        assert summary.findings == {
            FindingKind.BARE_EXCEPT: 1,
            FindingKind.MUTABLE_DEFAULT: 1,
            FindingKind.MISSING_DOCSTRING: 2,
            FindingKind.SYNTAX_ERROR: 1,
            FindingKind.UNDECODABLE: 0,
            FindingKind.TOO_DEEP: 0,
            FindingKind.UNREADABLE: 0,
        }

    def test_the_report_says_what_was_found_and_where(self, audits: list[FileAudit]) -> None:
        report = render("the shop", audits)
        rows = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in report.splitlines()}
        assert report.startswith("# Audit of `the shop`\n")
        assert rows >= {
            ("Files", "5"),
            ("Missing docstrings", "2 of 4 public definitions"),
            ("`add`", "`src/shop/basket.py:1`", "3", "2", "1"),
            ("`src/shop/basket.py:1`", "`add(items=[])`"),
            ("`src/shop/till/cash.py:3`", "`in the module`"),
            ("`src/shop`", "2", "3", "2", "33 %"),
            ("`src/shop/till`", "2", "1", "0", "100 %"),
            ("`src/shop/_own`", "1", "0", "0", "n/a"),
        }
        assert "`src/shop/till/old.py:1` | `syntax-error: Missing parentheses" in report

    def test_the_order_of_the_audits_changes_nothing(self, audits: list[FileAudit]) -> None:
        report = render("shop", audits)
        for seed in range(10):
            shuffled = random.Random(seed).sample(audits, len(audits))
            assert render("shop", shuffled) == report
            assert summarise(shuffled) == summarise(audits)

    def test_a_stored_audit_reports_like_a_fresh_one(self, audits: list[FileAudit]) -> None:
        stored = [FileAudit.model_validate_json(audited.model_dump_json()) for audited in audits]
        assert render("shop", stored) == render("shop", audits)

    def test_nothing_audited_is_still_a_report(self) -> None:
        assert render("nothing", []).count("None.") == 6
        assert summarise([]).files == 0

    def test_a_ranking_is_exact_over_all_files(self, tmp_path: Path) -> None:
        long = "\n".join(f"def long{n}():\n" + "    pass\n" * (50 + n) for n in range(12))
        short = "\n".join(f"def short{n}():\n    pass\n" for n in range(12))
        report = render("two", [audit(tmp_path, short, "a.py"), audit(tmp_path, long, "b.py")])
        ranked = report.partition("## Longest functions")[2].partition("##")[0]
        assert [f"`long{n}`" in ranked for n in range(12)] == [False] * 2 + [True] * RANKED
        assert "short" not in ranked

    def test_a_long_list_is_cut_and_says_so(self, tmp_path: Path) -> None:
        source = "try: pass\nexcept: pass\n" * (LISTED_PER_KIND + 5)
        report = render("many", [audit(tmp_path, source, f"m{n}.py") for n in range(4)])
        listed = report.partition("## Bare excepts")[2].partition("##")[0]
        assert listed.count("`in the module`") == 100
        assert f"… and {4 * (LISTED_PER_KIND + 5) - 100} more." in listed

    @pytest.mark.parametrize(
        ("name", "shown"),
        [("a|b.py", r"`a\|b.py:1`"), ("a`b.py", "`` a`b.py:1 ``"), ("a\nb.py", r"`a\nb.py:1`")],
    )
    def test_odd_file_names_do_not_break_a_table(self, tmp_path: Path, name: str, shown: str) -> None:
        report = render("odd", [audit(tmp_path, "def f(:", name)])
        assert f"| {shown} | `syntax-error: " in report


@pytest.fixture(scope="module")
def library() -> list[FileAudit]:
    """The whole standard library, audited by fresh processes with hash seeds of their own."""
    files = list_files(STANDARD_LIBRARY)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        return list(processes.map(partial(audit_file, STANDARD_LIBRARY), files, chunksize=20))


class TestStandardLibrary:
    def test_every_file_is_audited(self, library: list[FileAudit]) -> None:
        summary = summarise(library)
        unread = sum(summary.findings[kind] for kind in UNREAD)
        assert [audited.path for audited in library] == list_files(STANDARD_LIBRARY)
        assert summary.files > 300
        assert summary.functions > 5_000
        assert unread < summary.files / 50
        assert summary.findings[FindingKind.UNREADABLE] == summary.findings[FindingKind.TOO_DEEP] == 0

    def test_another_run_says_the_same(self, library: list[FileAudit]) -> None:
        known = {audited.path: audited.model_dump_json() for audited in library}
        for path in list_files(STANDARD_LIBRARY, 60):
            assert audit_file(STANDARD_LIBRARY, path).model_dump_json() == known[path]

    def test_an_audit_is_small(self, library: list[FileAudit]) -> None:
        assert max(len(audited.model_dump_json()) for audited in library) < 20_000

    def test_the_report_is_the_same_in_any_order(self, library: list[FileAudit]) -> None:
        report = render("stdlib", library)
        assert render("stdlib", random.Random(1).sample(library, len(library))) == report
        assert STANDARD_LIBRARY not in report
