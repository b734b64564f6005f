"""Whom the headers of a request name, and when they are believed."""

from pathlib import Path

import pytest
from multidict import CIMultiDict

from bamboo_operator.auth.page_callers import (
    LEAST_SECRET,
    PageCaller,
    PageRefusal,
    ProxyCaller,
    ProxyHeaders,
    TokenCaller,
    caller_of,
    read_secret,
)

SECRET = "correct-horse-battery"  # noqa: S105 - of these tests
PROXY = ProxyHeaders(secret=Path("secret"))
OIDC = ProxyHeaders(secret=Path("secret"), user="X-Email", groups="X-Roles", user_prefix="oidc:", group_prefix="oidc:")
SHOWN = ("X-Bamboo-Proxy-Secret", SECRET)
ANN = ("X-Forwarded-User", "ann")
TOKEN = ("Authorization", "Bearer t")
AUTHENTICATED = "system:authenticated"

Header = tuple[str, str]


@pytest.mark.parametrize(
    ("headers", "proxy", "found"),
    [
        ([], PROXY, None),
        ([TOKEN], PROXY, TokenCaller("t")),
        ([SHOWN, ANN], PROXY, ProxyCaller("ann", (AUTHENTICATED,))),
        ([("x-bamboo-proxy-secret", SECRET), ("x-forwarded-user", "ann")], PROXY, ProxyCaller("ann", (AUTHENTICATED,))),
        ([SHOWN, ANN, TOKEN], PROXY, ProxyCaller("ann", (AUTHENTICATED,))),
        (
            [SHOWN, ANN, ("X-Forwarded-Groups", "ml, research,,")],
            PROXY,
            ProxyCaller("ann", ("ml", "research", AUTHENTICATED)),
        ),
        (
            [SHOWN, ("X-Email", "ann@x.org"), ("X-Roles", "ml"), ANN],
            OIDC,
            ProxyCaller("oidc:ann@x.org", ("oidc:ml", AUTHENTICATED)),
        ),
        # forged: without the secret, with a wrong one, with a part of it, with two, or where no proxy is trusted
        ([ANN], PROXY, None),
        ([ANN, TOKEN], PROXY, TokenCaller("t")),
        ([("X-Bamboo-Proxy-Secret", "guess"), ANN], PROXY, None),
        ([("X-Bamboo-Proxy-Secret", SECRET[:-1]), ANN], PROXY, None),
        ([("X-Bamboo-Proxy-Secret", ""), ANN], PROXY, None),
        ([("X-Bamboo-Proxy-Secret", "ä\udcff"), ANN], PROXY, None),
        ([("X-Bamboo-Proxy-Secret", "guess"), SHOWN, ANN], PROXY, None),
        ([SHOWN, ANN], None, None),
        ([SHOWN, ANN, TOKEN], None, TokenCaller("t")),
        # another's header, where the proxy has other names
        ([SHOWN, ANN], OIDC, "does not say who looks"),
        # what the caller has sent along, and the proxy has not taken away
        ([SHOWN, ("X-Forwarded-User", "root"), ANN], PROXY, "does not say who looks"),
        ([SHOWN, ANN, ("X-Forwarded-Groups", "root"), ("X-Forwarded-Groups", "ml")], PROXY, "at most, got 2"),
        ([SHOWN, ("X-Forwarded-User", " ")], PROXY, "does not say who looks"),
        # the cluster's own names
        ([SHOWN, ("X-Forwarded-User", "system:admin")], PROXY, "the cluster's own"),
        ([SHOWN, ANN, ("X-Forwarded-Groups", "system:masters,ml")], PROXY, ProxyCaller("ann", ("ml", AUTHENTICATED))),
    ],
)
def test_who_asks(headers: list[Header], proxy: ProxyHeaders | None, found: PageCaller | str | None) -> None:
    said = caller_of(CIMultiDict(headers), proxy, SECRET.encode())
    if isinstance(found, str):
        assert isinstance(said, PageRefusal)
        assert found in said.sentence
    else:
        assert said == found


def test_without_a_secret_nobody_is_believed() -> None:
    assert caller_of(CIMultiDict([SHOWN, ANN]), PROXY, None) is None


def test_no_two_callers_are_taken_for_the_same() -> None:
    callers = [
        TokenCaller("ann"),
        ProxyCaller("ann", ()),
        ProxyCaller("ann", ("ml",)),
        ProxyCaller("annml", ()),
        ProxyCaller("ann", ("ml", "x")),
        ProxyCaller("ann", ("mlx",)),
    ]
    assert len({caller.key for caller in callers}) == len(callers)


def test_a_secret_is_read_without_its_newline_and_must_not_be_short(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s" * LEAST_SECRET + "\n")
    assert read_secret(file) == b"s" * LEAST_SECRET
    file.write_text("short\n")
    with pytest.raises(ValueError, match=f"expected at least {LEAST_SECRET} bytes in .*, got 5"):
        read_secret(file)
