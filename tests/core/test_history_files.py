"""The files of a history."""

from bamboo.history.files import HistoryFile, file_of


def test_names_sort_as_they_were_begun():
    files = [HistoryFile(2, 1, 0), HistoryFile(1, 12, 3), HistoryFile(1, 9, 10)]
    assert sorted(file.name for file in files) == [file.name for file in sorted(files)]
    assert [file_of(file.name) for file in files] == files
    assert file_of("000001-0000000001-000000.jsonl.partial") is None
