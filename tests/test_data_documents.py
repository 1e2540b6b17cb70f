"""Which files a text source finds under the paths that a user gives, and which paths it refuses."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mixle_megatron.config.data import TextSection
from mixle_megatron.data import check_source
from mixle_megatron.data.documents import find_documents


@pytest.fixture
def corpus(tmp_path):
    """A folder with text at two depths, and things beside it that are no text."""
    files = {
        "b.txt": "bee",
        "a.MD": "ay",
        "deep/er/c.py": "sea",
        "deep/table.csv": "1,2",
        "deep/empty.txt": "",
        ".hidden/d.txt": "dee",
        "__pycache__/e.py": "ee",
    }
    for name, text in files.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "corpus"


def names(*paths, suffixes=None):
    documents, faults = find_documents([str(path) for path in paths], suffixes)
    assert faults == []
    return [document.name for document in documents]


def faults(*paths, suffixes=None):
    return [str(fault) for fault in find_documents([str(path) for path in paths], suffixes)[1]]


def test_a_folder_gives_its_text_in_order_of_name(corpus):
    assert names(corpus) == ["a.MD", "b.txt", "deep/er/c.py"]


def test_suffixes_say_which_files_count(corpus):
    assert names(corpus, suffixes=["csv", ".TXT"]) == ["b.txt", "deep/table.csv"]


def test_a_file_named_itself_needs_no_suffix(corpus):
    assert names(corpus / "deep/table.csv") == ["table.csv"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["a.MD", "b.txt", "deep/er/c.py"]),
        ("*.txt", ["b.txt"]),
        ("[ab].*", ["a.MD", "b.txt"]),
        ("deep/*", ["er/c.py", "table.csv"]),
        ("**/*", ["a.MD", "b.txt", "deep/er/c.py", "deep/table.csv"]),
        ("**", ["a.MD", "b.txt", "deep/er/c.py", "deep/table.csv"]),
        ("**/**/c.py", ["deep/er/c.py"]),
        ("d*p/**/c.*", ["deep/er/c.py"]),
    ],
)
def test_globs(corpus, pattern, expected):
    assert names(corpus / pattern) == expected


def test_relative_paths_and_globs(corpus, monkeypatch):
    monkeypatch.chdir(corpus)
    assert names("b.txt", "*.MD", "**/*.py", "deep") == ["b.txt", "a.MD", "deep/er/c.py"]


def test_a_file_reached_twice_is_one_document(corpus):
    os.link(corpus / "b.txt", corpus / "same.txt")
    (corpus / "link.txt").symlink_to("b.txt")
    (corpus / "z").symlink_to("deep")
    assert names(corpus / "b.txt", corpus) == ["b.txt", "a.MD", "deep/er/c.py"]


def test_a_name_with_a_bracket_is_a_name_first(tmp_path):
    (tmp_path / "a[1].txt").write_text("a")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_the_librarys_sources_leave_out_installed_packages():
    found = names("stdlib")
    assert {"stdlib/os.py", "stdlib/json/decoder.py"} <= set(found)
    assert found == sorted(found)
    assert all(name.endswith(".py") for name in found)
    assert not any("site-packages" in name or "__pycache__" in name for name in found)


def test_every_bad_path_is_a_fault_of_its_own(corpus, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    bad = ["nothing", "empty.txt", "pipe", "corpas", "*.rst", "absent/x.txt"]
    found = find_documents([str(tmp_path / each) for each in bad] + [str(corpus)])[1]
    assert [fault.field for fault in found] == ["data.paths"] * len(bad)
    assert [fault.value for fault in found] == [str(tmp_path / each) for each in bad]
    rules = [fault.rule for fault in found]
    assert rules[:4] == [
        "holds no files",
        "is an empty file",
        "is neither a regular file nor a folder",
        "does not exist",
    ]
    assert found[3].remedy == f"did you mean {corpus}?"
    assert rules[4] == "matches no file"
    assert "no readable folder" in found[5].remedy


def test_a_folder_without_text_says_what_it_holds(tmp_path):
    for name in ("a.csv", "b.csv", "c.bin", "plain"):
        (tmp_path / name).write_text("x")
    (fault,) = find_documents([str(tmp_path)])[1]
    assert "ends in .txt, .md, .rst, .py; found 2 .csv, 1 .bin, 1 without a suffix" in fault.rule
    assert fault.remedy == "set data.suffixes, for instance [.csv]"


def test_only_empty_files(tmp_path):
    (tmp_path / "a.txt").touch()
    assert "holds only empty files (1)" in faults(tmp_path)[0]


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*"])
def test_a_link_to_a_folder_above_is_refused(corpus, pattern):
    (corpus / "deep" / "round").symlink_to("..")
    (fault,) = faults(corpus / pattern)
    assert "leads back" in fault
    assert "deep/round" in fault


def test_links_to_themselves_and_to_nothing_are_refused(tmp_path):
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    (tmp_path / "knot").symlink_to("knot")
    inside, named = faults(tmp_path, tmp_path / "gone.txt")
    assert "holds 2 entries that cannot be read" in inside
    assert "Too many levels of symbolic links" in inside
    assert "gone.txt cannot be read" in named


def test_unreadable_files_are_refused(corpus, monkeypatch):
    # The tests may run as root, whom no mode stops.
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("b.txt"))
    (folder, named) = faults(corpus, corpus / "b.txt")
    assert "b.txt (Permission denied)" in folder
    assert "Permission denied" in named


def test_the_check_reads_no_text_and_loads_no_numpy(corpus):
    code = (
        "import sys; from types import SimpleNamespace as N; from mixle_megatron.data import check_source;"
        "s = N(source='text', tokenizer='byte', paths=sys.argv[1:], suffixes=None, max_bytes=None,"
        " validation_fraction=0.0);"
        "assert check_source(s, seed=1, seq_length=2) == [];"
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(corpus)], check=True)


def test_all_faults_of_a_section_at_once(tmp_path):
    section = SimpleNamespace(
        source="tokens",
        tokenizer="bpe",
        paths=[str(tmp_path / "absent"), str(tmp_path)],
        suffixes=None,
        max_bytes=0,
        validation_fraction=1.0,
    )
    assert [fault.field for fault in check_source(section)] == [
        "data.source",
        "data.tokenizer",
        "data.validation_fraction",
        "data.max_bytes",
        "data.paths",
        "data.paths",
    ]


def test_two_folders_that_link_to_each_other_are_a_loop(tmp_path):
    for here, there in (("a", "b"), ("b", "a")):
        (tmp_path / here).mkdir()
        (tmp_path / here / "t.txt").write_text(here)
        (tmp_path / here / "other").symlink_to(f"../{there}")
    assert "leads back" in faults(tmp_path)[0]


@pytest.mark.parametrize(
    "path", ["", "\0", "a\0*", "**/\0", "[", "~nobody-of-that-name/x", "x" * 5000, "*" * 400]
)
def test_nonsense_is_a_fault_and_no_traceback(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert len(faults(path)) == 1


def test_a_misspelt_stdlib(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert faults("stdlb") == ["data.paths=stdlb does not exist; did you mean stdlib?"]


def test_no_paths():
    assert "names nothing to read" in faults()[0]


def test_a_cap_takes_whole_documents_from_all_of_the_corpus(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text("x" * 10)
    section = TextSection(paths=[str(tmp_path)], max_bytes=9)
    (fault,) = check_source(section)
    assert (fault.field, fault.remedy) == ("data.max_bytes", "give at least 10")
    assert check_source(section.model_copy(update={"max_bytes": 105}), seed=3) == []
