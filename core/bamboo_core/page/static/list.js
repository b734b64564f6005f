// Has the list of jobs drawn, every two seconds; which lines are shown is in the page's address.

import { announce, startAsking } from "./asking.js";
import { byId, changed, dash, el, number, rate, show } from "./dom.js";
import { chosen, drawRows, wantsAttention } from "./rows.js";

const VERSION = 3;
const PAUSE = 2;
const PAUSE_OF_MANY = 5;
const MANY = 300; // lines
const CHOICES = { name: "by-name", namespace: "by-namespace", state: "by-state", order: "order" };
const FIRST_ORDER = "attention";

let list = null; // the newest
const choice = Object.fromEntries(Object.keys(CHOICES).map((name) => [name, new URLSearchParams(location.search).get(name) ?? ""]));
choice.order ||= FIRST_ORDER;

for (const [name, id] of Object.entries(CHOICES)) {
  byId(id).value = choice[name];
  byId(id).addEventListener("input", () => {
    choice[name] = byId(id).value;
    const kept = Object.entries(choice).filter(([key, value]) => value && !(key === "order" && value === FIRST_ORDER));
    const query = new URLSearchParams(kept).toString();
    history.replaceState(null, "", query ? `?${query}` : location.pathname);
    if (list) draw();
  });
}

function draw() {
  show(byId("main"), true);
  const { rows, now, unknown, grafana } = list;
  options("by-namespace", "all namespaces", "namespace", rows.map((row) => row.namespace), []);
  options("by-state", "all states", "state", rows.map((row) => row.state.name), [["!", "asks for attention"]]);
  tiles(rows);
  if (changed("unknown", unknown) && show(byId("unknown"), unknown.length > 0)) byId("unknown").replaceChildren(...unknown.map((sentence) => el("li", {}, sentence)));
  if (changed("grafana", grafana) && show(byId("grafana"), grafana !== null)) byId("grafana").href = grafana;
  const lines = chosen(rows, choice);
  const told = rows.length ? (lines.length < rows.length ? `${number(lines.length, 0)} of ${number(rows.length, 0)} are shown.` : "") : "There are no jobs.";
  if (byId("shown").textContent !== told) byId("shown").textContent = told;
  drawRows(lines, now);
}

// A select's options; what is chosen stays, also while no job has it.
function options(id, all, key, values, more) {
  const found = [...new Set(choice[key] && choice[key] !== "!" ? [...values, choice[key]] : values)].sort();
  if (!changed(id, found)) return;
  const each = [["", all], ...more, ...found.map((value) => [value, value])];
  byId(id).replaceChildren(...each.map(([value, text]) => el("option", { value }, text)));
  byId(id).value = choice[key];
}

function tiles(rows) {
  const known = (field) => rows.map((row) => row[field]).filter((value) => value !== null);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const attention = rows.filter(wantsAttention).length;
  const costs = known("costPerHour");
  const facts = [
    ["Jobs", number(rows.length, 0), `${number(rows.filter((row) => !row.state.over).length, 0)} not over`],
    ["Ask for attention", number(attention, 0), ""],
    ["Workers", number(sum(known("workers")), 0), `of ${number(sum(known("workersWanted")), 0)}`],
    ["Samples/s", rate(sum(known("samplesPerSecond"))), ""],
    ["Cost an hour", costs.length ? number(sum(costs), 2) : dash, ""],
  ];
  if (!changed("tiles", facts)) return;
  document.title = attention ? `Bamboo: jobs (${attention})` : "Bamboo: jobs";
  byId("tiles").replaceChildren(...facts.map(([name, value, small]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("small", {}, small)))));
}

function heard(found) {
  const before = list;
  list = found;
  draw();
  if (before) announce(news(before.rows, list.rows));
  return { over: false, pause: list.rows.length > MANY ? PAUSE_OF_MANY : PAUSE };
}

// Jobs whose state has become another, in sentences.
function news(before, now) {
  const states = new Map(before.map((row) => [`${row.namespace}/${row.name}`, row.state.name]));
  const other = now.filter((row) => (states.get(`${row.namespace}/${row.name}`) ?? row.state.name) !== row.state.name);
  return other.map((row) => `${row.name}: ${row.state.name}`);
}

startAsking(VERSION, heard);
