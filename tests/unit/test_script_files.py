"""Scripts as files: safe names, numbers that never overwrite, and a reader that stays in its folders."""

import os
import threading
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.errors import ScriptError
from a3b_engine.script import files
from a3b_engine.script.files import find_script, read_text, save_pair, script_names
from a3b_engine.script.safe_names import MAX_NAME_BYTES, safe_name, split_prefix

HOSTILE = ["..", ".", "", " ", "con", "COM1", "nul.txt", "a/b", "a\\b", "C:", "a\0b", "a\nb", "\u202egpj.exe", "a.", "b ", "\u6f2b\u753b", "x" * 300, "\u6f2b" * 300, "~", "$HOME", "-rf", "a:b", "*?<>|\"", "%title%", "%year%"]
parts = st.sampled_from(HOSTILE) | st.text(max_size=8)


# Names


@pytest.mark.parametrize(
    "text, name",
    [
        ("Rain at dusk", "Rain at dusk"),
        ("a/b\\c", "a_b_c"),
        ('<Rain>: "what?" | *', "_Rain__ _what__ _ _"),
        ("CON", "_CON"),
        ("com1.tar.gz", "_com1.tar.gz"),
        ("COM\u00b9", "_COM\u00b9"),
        ("console", "console"),
        ("dots... ", "dots"),
        ("...", "script"),
        ("\u202e\u200b\x00", "script"),
        ("line\nbreak\ttab", "line break tab"),
        ("e\u0301", "\u00e9"),
        ("\u96e8\u591c\u7684\u706f\u5854", "\u96e8\u591c\u7684\u706f\u5854"),
        ("\u6f2b" * 90, "\u6f2b" * 33),
    ],
)
def test_safe_names(text, name):
    assert safe_name(text) == name


@given(st.text(max_size=200) | parts)
def test_any_text_becomes_one_plain_part_of_a_path(text):
    name = safe_name(text)
    assert name and len(name.encode("utf-8")) <= MAX_NAME_BYTES + 1
    assert not set(name) & set('<>:"|?*/\\') and name.isprintable() and name == name.rstrip(". ") and name not in (".", "..")
    assert not PureWindowsPath(name).is_reserved() and PurePosixPath(name).name == name
    assert safe_name(name) == name


def test_prefix_with_folders_title_and_time():
    assert split_prefix("comic/page") == (PurePosixPath("comic"), "page")
    assert split_prefix("comic\\%title%", "Rain: a/b") == (PurePosixPath("comic"), "Rain_ a_b")
    assert split_prefix("%title%", "..") == (PurePosixPath(), "script")
    assert split_prefix("a/./nul/b") == (PurePosixPath("a/_nul"), "b")
    assert split_prefix("comic/") == (PurePosixPath("comic"), "script")
    assert split_prefix("") == (PurePosixPath(), "script")
    folder, stem = split_prefix("%year%-%month%-%day%/%hour%%minute%%second%")
    assert len(folder.name) == 10 and folder.name[4] == "-" and stem.isdecimal() and len(stem) == 6


@pytest.mark.parametrize("prefix", ["/etc/x", "\\\\server\\share", "../x", "a/../../x", "a\\..\\x", "C:\\x", "c:x", "a/ .. /b", "a/b/c/d/e/f/g/h"])
def test_a_prefix_that_leads_out_is_refused(prefix):
    with pytest.raises(ScriptError, match="^filename_prefix: "):
        split_prefix(prefix)


@given(st.lists(parts, max_size=4).map("/".join), parts)
def test_any_prefix_stays_below_or_is_refused(prefix, title):
    try:
        folder, stem = split_prefix(prefix, title)
    except ScriptError as error:
        assert str(error).startswith("filename_prefix: ")
    else:
        assert not folder.is_absolute() and ".." not in folder.parts
        assert all(safe_name(part) == part for part in (*folder.parts, stem))


# Saving


def save(root, prefix="comic/page", texts=("{}", "text\n")):
    return save_pair(root, prefix, "T", texts)


def test_pairs_are_numbered_as_comfyui_does(tmp_path):
    first, second = save(tmp_path, texts=("\u96e8", "a\r\nb")), save(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in (*first, *second)] == [
        "comic/page_00001_.json",
        "comic/page_00001_.fountain",
        "comic/page_00002_.json",
        "comic/page_00002_.fountain",
    ]
    assert first[0].read_bytes() == "\u96e8".encode() and first[1].read_bytes() == b"a\r\nb"


def test_numbers_go_on_behind_whatever_is_there(tmp_path):
    (tmp_path / "page_00007_.png").write_bytes(b"x")
    (tmp_path / "PAGE_00009_.fountain").write_bytes(b"mine")
    (tmp_path / "page_two_00099_.json").write_bytes(b"x")
    (tmp_path / "page_9999999999_.json").write_bytes(b"x")  # no number of ours
    assert save(tmp_path, "page")[0].name == "page_00010_.json"
    assert (tmp_path / "PAGE_00009_.fountain").read_bytes() == b"mine"


def test_a_number_that_is_taken_meanwhile_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_last_number", lambda folder, stem: 0)
    (tmp_path / "page_00001_.fountain").write_bytes(b"mine")
    (tmp_path / "page_00002_.json").write_bytes(b"mine")
    assert [path.name for path in save(tmp_path, "page")] == ["page_00003_.json", "page_00003_.fountain"]
    assert sorted(os.listdir(tmp_path)) == ["page_00001_.fountain", "page_00002_.json", "page_00003_.fountain", "page_00003_.json"]


def test_savers_at_the_same_time_get_files_of_their_own(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda n=n: made.append((n, save(tmp_path, texts=(str(n), str(n)))))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({paths for _, paths in made}) == 12
    assert all(path.read_text(encoding="utf-8") == str(n) for n, paths in made for path in paths)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "comic").write_bytes(b"a file")
    with pytest.raises(ScriptError, match="^filename_prefix: cannot write to "):
        save(tmp_path)


def test_a_failure_leaves_nothing_half_written(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        save(tmp_path, "page", texts=("{}", "\ud800"))
    assert os.listdir(tmp_path) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(parts, max_size=3).map("/".join), parts)
def test_any_prefix_writes_below_its_folder(tmp_path_factory, prefix, title):
    root = tmp_path_factory.mktemp("output")
    try:
        paths = save_pair(root, prefix, title, ("a", "b"))
    except ScriptError:
        assert not any(path.is_file() for path in root.rglob("*"))
    else:
        assert all(path.resolve().is_relative_to(root.resolve()) and path.is_file() for path in paths)


# Loading


@pytest.fixture
def roots(tmp_path):
    roots = {"input": tmp_path / "input", "output": tmp_path / "output"}
    for name, root in roots.items():
        (root / "comic" / ".hidden").mkdir(parents=True)
        (root / "both.json").write_text(name, encoding="utf-8")
        (root / "comic" / "b.JSON").write_text(name, encoding="utf-8")
        (root / "comic" / ".hidden" / "x.json").write_text(name, encoding="utf-8")
        (root / "comic" / "a.png").write_bytes(b"x")
    (roots["output"] / "only \u6f2b\u753b.txt").write_text("output", encoding="utf-8")
    (tmp_path / "secret.json").write_text("secret", encoding="utf-8")
    return roots


def test_json_files_of_both_folders_are_listed(roots):
    assert script_names(roots) == ["both.json", "comic/b.JSON", "both.json [output]", "comic/b.JSON [output]"]
    assert script_names({"input": roots["input"] / "missing"}) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows takes no such names")
def test_what_is_listed_can_be_loaded_and_the_rest_is_not_listed(roots):
    root = roots["input"]
    for name in (" lead.json", "two  spaces .json", "line\nfeed.json", "back\\slash.json", "a:b.json", "\u202ex.json"):
        (root / name).write_text("input", encoding="utf-8")
    (root / " dir ").mkdir()
    (root / " dir " / "x.json").write_text("input", encoding="utf-8")
    os.mkfifo(root / "pipe.json")
    (root / "dead.json").symlink_to(root / "gone")
    (roots["output"] / " lead.json").write_text("output", encoding="utf-8")
    names = script_names(roots)
    assert {" lead.json", "two  spaces .json", " dir /x.json", " lead.json [output]"} < set(names)
    assert not any(sign in name for name in names for sign in ("\n", "\\", ":", "pipe", "dead", "\u202e"))
    for name in names:
        assert read_text(find_script(name, roots)) == ("output" if name.endswith("[output]") else "input")


def test_a_list_has_an_end(roots, monkeypatch):
    monkeypatch.setattr(files, "MAX_LISTED", 3)
    for number in range(9):
        (roots["input"] / f"n{number}.json").write_bytes(b"")
    assert len(script_names(roots)) == 5


@pytest.mark.parametrize(
    "name, where",
    [
        ("both.json", "input"),
        ("both.json [output]", "output"),
        ("both.json[input]", "input"),
        ("comic\\b.JSON [output]", "output"),
        (" comic/./b.JSON ", "input"),
        ("only \u6f2b\u753b.txt", "output"),
    ],
)
def test_names_are_found(roots, name, where):
    path = find_script(name, roots)
    assert read_text(path) == where and path.is_relative_to(roots[where])


@pytest.mark.parametrize("name", ["../secret.json", "comic/../../secret.json", "..\\secret.json", "comic\\..\\..\\secret.json [output]", "/etc/passwd", "\\\\host\\x.json", "C:\\x.json", "c:x.json", "a\0b", "a\nb", " ../secret.json", "a/D:/secret/x.json", "comic\\D:\\x.json", "both.json:stream", "a/.. ./x.json", "a/.../x.json"])
def test_names_that_lead_elsewhere_are_refused(roots, name):
    with pytest.raises(ScriptError, match="is not a name below ComfyUI's input or output folder"):
        find_script(name, roots)


@pytest.mark.parametrize("name", ["", "comic", "missing.json", "both.json [temp]", "x" * 5000])
def test_names_that_are_not_there_say_where_was_looked(roots, name):
    with pytest.raises(ScriptError, match="was not found") as caught:
        find_script(name, roots)
    assert str(roots["output"]) in str(caught.value) and len(str(caught.value)) < 200 + 2 * len(str(roots["output"])) + 120


@given(st.lists(parts, max_size=4).map("/".join), st.sampled_from(["", " [output]", "[input]", " [temp]"]))
@settings(deadline=None)
def test_no_name_leads_out(tmp_path_factory, name, mark):
    base = tmp_path_factory.getbasetemp()
    roots = {"input": base / "in", "output": base / "out"}
    try:
        path = find_script(name + mark, roots)
    except ScriptError as error:
        str(error).encode("utf-8", "backslashreplace")
    else:
        assert any(path.is_relative_to(root) for root in roots.values())


@pytest.mark.parametrize("data", ["\u96e8".encode(), b"\xef\xbb\xbf" + "\u96e8".encode(), "\u96e8".encode("utf-16"), b"\xfe\xff" + "\u96e8".encode("utf-16-be")])
def test_text_of_common_editors(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    assert read_text(tmp_path / "a.json") == "\u96e8"


def test_other_bytes_and_huge_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_bytes("\u96e8".encode("gbk"))
    with pytest.raises(ScriptError, match="a.json is not UTF-8 text .byte 0.. Save it as UTF-8"):
        read_text(tmp_path / "a.json")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 2**20)
    (tmp_path / "b.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ScriptError, match="b.json is larger than 1 MB"):
        read_text(tmp_path / "b.json")
    with pytest.raises(ScriptError, match="cannot be read"):
        read_text(tmp_path / "gone.json")
