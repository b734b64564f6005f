from bamboo_core.text import one_line, printable, wrapped


def test_what_others_say_fits_into_one_printable_line() -> None:
    assert one_line("first\n  second\r\n\tthird\x1b[2J\x00 ü") == "first second third\N{MIDDLE DOT}[2J\N{MIDDLE DOT} ü"
    assert one_line("") == ""
    long = one_line("a" * 5000 + "z" * 5000, most=101)
    assert (len(long), long[:48], long[-48:], long[48:53]) == (101, "a" * 48, "z" * 48, " ... ")


def test_others_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b]0;x\x07b\x1b[31mc\x1b[0m\r\td") == "a ]0;x bc \td"
    assert printable("\x1b[2J\x1b[31mred\x1b[0m", colours=True) == " [2J\x1b[31mred\x1b[0m"


def test_lines_end_between_words_and_go_on_further_in() -> None:
    sentence = "a sentence of words, some-with-hyphens, and aWordThatIsLongerThanTheWholeLine here"
    text = f"short\n  {sentence}\n    | quoted is as it was"
    assert wrapped(text, 24).splitlines() == [
        "short",
        "  a sentence of words,",
        "    some-with-hyphens,",
        "    and",
        "    aWordThatIsLongerThanTheWholeLine",
        "    here",
        "    | quoted is as it was",
    ]
    assert wrapped(text, 200) == text
