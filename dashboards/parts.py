"""Builders of dashboards and panels. Every panel has a unit, a title and a description, and queries $datasource."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as d
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import prometheus as prometheus_models

HEIGHT = 8
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

ONE_JOB = 'namespace="$namespace", job="$job"'
SOME_JOBS = 'namespace=~"$namespace", job=~"$job"'
SOME_NAMESPACES = 'namespace=~"$namespace"'
JOBS = '{__name__=~"bamboo_job_state|bamboo_job_step"}'


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel. legend: Grafana's format, such as {{job}}."""

    expr: str
    legend: str = ""


Panels = Sequence[Any]


def increase(counter: str, window: str = "1h", *, by: str = "") -> str:
    """Return the PromQL query of a counter's increase in a window, summed. by: labels or "". counter: with selector."""
    return f"sum{f' by ({by}) ' if by else ''}(increase({counter}[{window}]))"


def per_second(counter: str, *, by: str = "") -> str:
    """Return the PromQL query of a counter's rate per second, summed. by: labels or "". counter: with its selector."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({counter}[$__rate_interval]))"


def goodput(selector: str, window: str = "1h") -> str:
    """Return the PromQL query of the useful share of the paid worker time in a window. selector: of jobs."""
    useful, paid = (f"bamboo_job_{name}_worker_seconds_total{{{selector}}}" for name in ("useful", "paid"))
    return f"{increase(useful, window)} / {increase(paid, window)}"


def quantile(share: float, buckets: str, window: str = "$__rate_interval") -> str:
    """Return the PromQL query of a histogram's quantile. buckets: the metric NAME_bucket, with its selector."""
    return f"histogram_quantile({share}, sum by (le) (rate({buckets}[{window}])))"


def _targets(builder: Any, queries: Sequence[Query], *, instant: bool) -> None:
    for index, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index)).datasource(SOURCE)
        target = target.legend_format(query.legend or "__auto")
        builder.with_target(target.instant() if instant else target.range())


def graph(
    title: str, text: str, unit: str, *queries: Query, width: int = 12, stacked: bool = False, most: float | None = None
) -> timeseries.Panel:
    """Return a panel of lines over time, or of stacked areas. most: the upper end of the axis."""
    legend = (
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["mean", "max", "lastNotNull"])
    )
    tooltip = (
        common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    panel = timeseries.Panel().title(title).description(text).unit(unit).datasource(SOURCE).span(width).height(HEIGHT)
    panel = panel.legend(legend).tooltip(tooltip).min(0).show_points(common.VisibilityMode.NEVER)
    panel = panel.fill_opacity(40 if stacked else 8).line_width(1)
    if stacked:
        panel = panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if most is not None:
        panel = panel.max(most)
    _targets(panel, queries, instant=False)
    return panel


def number(
    title: str, text: str, unit: str, query: str, *, width: int = 4, steps: Sequence[tuple[float | None, str]] = ()
) -> stat.Panel:
    """Return a panel of one number. steps: the lowest value for each colour, and the colour; None for the first."""
    reduce = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().title(title).description(text).unit(unit).datasource(SOURCE).span(width).height(4)
    panel = panel.reduce_options(reduce).color_mode(common.BigValueColorMode.VALUE)
    panel = panel.graph_mode(common.BigValueGraphMode.NONE).no_value("none")
    colours = [dashboard.Threshold(value=value, color=colour) for value, colour in steps or ((None, "text"),)]
    panel = panel.thresholds(d.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(colours))
    _targets(panel, [Query(query)], instant=True)
    return panel


def words(title: str, text: str, *queries: Query, width: int = 8) -> stat.Panel:
    """Return a panel that shows text, such as a state: the legend of each series that the queries return."""
    reduce = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().title(title).description(text).unit("none").datasource(SOURCE).span(width).height(4)
    panel = panel.reduce_options(reduce).text_mode(common.BigValueTextMode.NAME).no_value("none")
    panel = panel.graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.VALUE)
    _targets(panel, queries, instant=True)
    return panel


def warm(title: str, text: str, unit: str, expr: str, *, width: int = 12) -> heatmap.Panel:
    """Return a heatmap over time. expr: the query of a histogram's increases by bucket (`le`)."""
    panel = heatmap.Panel().title(title).description(text).unit(unit).datasource(SOURCE).span(width).height(HEIGHT)
    panel = panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(unit))
    target = prometheus.Dataquery().expr(expr).ref_id("A").datasource(SOURCE).range().legend_format("{{le}}")
    return panel.with_target(target.format(prometheus_models.PromQueryFormat.HEATMAP))


def listing(
    title: str, text: str, state: str, columns: Sequence[tuple[str, str, str]], *, width: int = 24
) -> table.Panel:
    """Return a table with a row for each job. state: a query with a label `state`. columns: heading, unit and query."""
    panel = table.Panel().title(title).description(text).unit("none").datasource(SOURCE).span(width).height(10)
    for index, expr in enumerate([state, *(column[2] for column in columns)]):
        target = prometheus.Dataquery().expr(expr).ref_id(chr(ord("A") + index)).datasource(SOURCE).instant()
        panel = panel.with_target(target.format(prometheus_models.PromQueryFormat.TABLE))
    names = {"namespace": "Namespace", "job": "Job", "state": "State"}
    names |= {f"Value #{chr(ord('B') + index)}": heading for index, (heading, _, _) in enumerate(columns)}
    hidden = {"Time": True, "Value #A": True}
    merge = dashboard.DataTransformerConfig(id_val="merge", options={})
    organize = dashboard.DataTransformerConfig(
        id_val="organize", options={"excludeByName": hidden, "renameByName": names}
    )
    panel = panel.transformations([merge, organize])
    for heading, unit, _ in columns:
        panel = panel.override_by_name(heading, [dashboard.DynamicConfigValue(id_val="unit", value=unit)])
    return panel


def _variables(*, job: bool, several: bool) -> list[Any]:
    source = d.DatasourceVariable("datasource").label("Data source").type("prometheus")
    found: list[Any] = [source]
    wanted = [("namespace", "Namespace", f"label_values({JOBS}, namespace)")]
    if job:
        matcher = JOBS[:-1] + ', namespace=~"$namespace"}'
        wanted.append(("job", "Job", f"label_values({matcher}, job)"))
    for name, label, query in wanted:
        variable = d.QueryVariable(name).label(label).query(query).datasource(SOURCE)
        variable = variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        variable = variable.sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        if several:
            everything = dashboard.VariableOption(text="All", value="$__all", selected=True)
            variable = variable.multi(True).include_all(True).all_value(".*").current(everything)
        found.append(variable)
    return found


def _annotation(name: str, colour: str, expr: str, title: str) -> d.AnnotationQuery:
    note = d.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
    return note.expr(expr).title_format(title).step("30s").hide(False)


def build(
    uid: str, title: str, text: str, rows: Sequence[tuple[str, Panels]], *, job: bool = True, several: bool = True
) -> dashboard.Dashboard:
    """Return a dashboard with a filter for namespaces. rows: headings and panels. job: whether it also has a filter for
    jobs. several: whether each filter takes several values.
    """
    selector = ONE_JOB if job and not several else SOME_JOBS if job else SOME_NAMESPACES
    board = d.Dashboard(title).uid(uid).description(text).tags(["bamboo"]).readonly().timezone("browser")
    board = board.refresh("30s").time("now-3h", "now").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    for variable in _variables(job=job, several=several):
        board = board.with_variable(variable)
    lost = f"sum by (namespace, job) (increase(bamboo_job_preemptions_total{{{selector}}}[1m])) > 0"
    board = board.annotation(_annotation("Preemptions", "red", lost, "{{job}}: workers lost or given notice"))
    moved = f"changes(bamboo_job_epoch{{{selector}}}[1m]) > 0"
    board = board.annotation(_annotation("Epochs", "blue", moved, "{{job}}: new plan"))
    link = d.DashboardLink("Bamboo").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["bamboo"])
    board = board.link(link.as_dropdown(True).include_vars(True).keep_time(True))
    count = 0
    for heading, panels in rows:
        count += 1
        board = board.with_row(d.Row(heading).id(count))
        for panel in panels:
            count += 1
            board = board.with_panel(panel.id(count))
    return board.build()
