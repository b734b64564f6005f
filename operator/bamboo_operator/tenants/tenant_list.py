"""Tenants: namespaces that share the nodes, and what each may have. A file that an administrator writes."""

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Final

from bamboo_core.job.fields import Fields, ManifestError, Problem, show
from bamboo_core.job.forms import Integer, Number, TextList, TextOf
from bamboo_core.job.model import ListOf, ReadObject, read_object
from bamboo_core.job.text_patterns import DECIMAL, DNS_LABEL, TextPattern, exactly
from bamboo_core.job.yaml_file import load_document
from bamboo_operator.followed_list import FollowedList, UnreadableList

FORMAT: Final = "bamboo-tenants"
VERSION: Final = 1
MOST_TENANTS: Final = 1000
MOST_NAMESPACES: Final = 1000  # of a tenant
EVERY_OTHER: Final = "*"  # in place of namespaces: all that no tenant names
MANY: Final = 1 << 30  # workers or devices, where there is no bound
NAMESPACE: Final = TextPattern(
    said=f'the name of a namespace, or "{EVERY_OTHER}" for all that no tenant names',
    pattern=re.compile(rf"\*|{DNS_LABEL.pattern.pattern}"),
    most=63,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBounds:
    """The most that all jobs of a tenant may have at a time. money_per_hour: what their workers may cost in an hour;
    money_per_day, money_per_month: and in a day and a month of UTC, however many they are.
    """

    workers: Annotated[int, Integer(1, MANY)] = MANY
    devices: Annotated[int, Integer(1, MANY)] = MANY
    money_per_hour: Annotated[Decimal | None, TextOf(DECIMAL, Decimal)] = None
    money_per_day: Annotated[Decimal | None, TextOf(DECIMAL, Decimal)] = None
    money_per_month: Annotated[Decimal | None, TextOf(DECIMAL, Decimal)] = None

    @property
    def has_sum(self) -> bool:
        """Does it bound what is spent in a while?"""
        return self.money_per_day is not None or self.money_per_month is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBounds:
    """The most that one of its jobs may have at a time."""

    workers: Annotated[int, Integer(1, MANY)] = MANY
    devices: Annotated[int, Integer(1, MANY)] = MANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Namespaces that share bounds and a weight: of two tenants that wait for nodes, the one that has less for its
    weight comes first.
    """

    name: Annotated[str, DNS_LABEL]
    namespaces: Annotated[tuple[str, ...], TextList(NAMESPACE, "namespaces", "A namespace.", MOST_NAMESPACES)]
    weight: Annotated[float, Number(1000)] = 1.0
    most: TenantBounds = field(default_factory=TenantBounds)
    most_per_job: JobBounds = field(default_factory=JobBounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class FairOrder:
    """When jobs that want the same nodes begin to get them one after the other, and how long a turn lasts in which no
    node comes. Both in seconds.
    """

    after_seconds: Annotated[float, Number(86400)] = 120.0
    turn_seconds: Annotated[float, Number(86400)] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantList:
    """A file of tenants. A namespace of none is a tenant by itself, without bounds and of weight 1."""

    format: Annotated[str, exactly(FORMAT)] = FORMAT
    version: Annotated[int, Integer(VERSION, VERSION)] = VERSION
    order: FairOrder = field(default_factory=FairOrder)
    tenants: Annotated[tuple[Tenant, ...], ListOf(MOST_TENANTS)] = ()

    def of(self, namespace: str) -> Tenant:
        """Whose namespace that is. Names tell tenants apart, also where one is called as the namespace of none."""
        named = next((one for one in self.tenants if namespace in one.namespaces), None)
        rest = next((one for one in self.tenants if EVERY_OTHER in one.namespaces), None)
        if (found := named or rest) is not None:
            return found
        taken = any(one.name == namespace for one in self.tenants)
        return Tenant(name=f"namespace {namespace}" if taken else namespace, namespaces=(namespace,))

    def owners(self, namespaces: Iterable[str]) -> dict[str, Tenant]:
        """Whose each of these is."""
        return {namespace: self.of(namespace) for namespace in set(namespaces)}


def read_tenants(path: str) -> TenantList:
    """A YAML or JSON file. Raises ManifestError with all mistakes."""
    return parse_tenants(load_document(path))


def parse_tenants(document: dict[str, object]) -> TenantList:
    """The tenants in a document. Raises ManifestError with all mistakes."""
    problems: list[Problem] = []
    found: list[ReadObject] = []
    fields = Fields(document, "", problems)
    for name in ("format", "version"):
        if fields.get(name) is None:
            problems.append(Problem(name, f"required, expected {FORMAT if name == 'format' else VERSION}"))
    tenants: TenantList = read_object(TenantList, fields, found)
    if mistakes := [*problems, *_wrong_namespaces(tenants, {one.path for one in problems})]:
        raise ManifestError(*mistakes)
    return tenants


def _wrong_namespaces(tenants: TenantList, wrong: Collection[str]) -> Iterator[Problem]:
    """A tenant has namespaces, and each belongs to one tenant. wrong: paths of fields with another mistake."""
    owners: dict[str, str] = {}
    for index, tenant in enumerate(tenants.tenants):
        above = f"tenants[{index}].namespaces"
        if not tenant.namespaces and not any(path.startswith(above) for path in wrong):
            yield Problem(above, "expected at least one namespace")
        for place, namespace in enumerate(tenant.namespaces):
            path = f"{above}[{place}]"
            if namespace in owners:
                yield Problem(path, f"{show(namespace)} is already used by {owners[namespace]}")
            owners.setdefault(namespace, path)


@dataclass(frozen=True, slots=True)
class TenantReader:
    """Reads the file once (`ListReader`). seconds: from one reading to the next."""

    path: str
    seconds: float

    def __str__(self) -> str:
        return self.path

    async def read(self) -> TenantList:
        """Raises UnreadableList."""
        try:
            return await asyncio.to_thread(read_tenants, self.path)
        except ManifestError as error:
            told = (one.message if one.path in (self.path, "manifest") else str(one) for one in error.problems)
            raise UnreadableList(f"{self.path}: {'; '.join(told)}") from None


class TenantSource(FollowedList[TenantList]):
    """Alone writes the operator's tenants. reader: None if jobs share nodes as they like."""

    def __init__(self, reader: TenantReader | None = None) -> None:
        super().__init__("tenants", "until there are some, only jobs that run get workers", reader)
