// The lines of the list of jobs: which are shown, in which order, and how each is drawn.

import { byId, dash, duration, el, loss, number, plural, rate, unseen } from "./dom.js";

const ATTENTION = new Set(["bad", "warn"]);
const ORDERS = {
  attention: () => 0, // as they come
  name: (a, b) => a.name.localeCompare(b.name) || a.namespace.localeCompare(b.namespace),
  newest: (a, b) => (b.made ?? 0) - (a.made ?? 0),
  cost: (a, b) => (b.cost ?? -1) - (a.cost ?? -1),
};

export const wantsAttention = ({ state }) => ATTENTION.has(state.tone);
const idOf = ({ namespace, name }) => `${namespace}/${name}`;

// state: a state's name, "!" for what asks for attention, "" for all.
export function chosen(rows, { name, namespace, state, order }) {
  const fits = (row) =>
    row.name.includes(name) && (!namespace || row.namespace === namespace) && (!state || (state === "!" ? wantsAttention(row) : row.state.name === state));
  return rows.filter(fits).sort(ORDERS[order] ?? ORDERS.attention);
}

// A line is drawn anew only if something in it has changed, so that what a person has selected or focused stays.
let drawn = new Map(); // by job: what the line says, and its node

export function drawRows(rows, now) {
  const before = drawn;
  drawn = new Map();
  const nodes = rows.map((row) => {
    const cells = cellsOf(row, now);
    const says = JSON.stringify([row.state, cells]);
    const known = before.get(idOf(row));
    const node = known && known.says === says ? known.node : line(row, cells);
    drawn.set(idOf(row), { says, node });
    return node;
  });
  const body = byId("rows");
  if (nodes.length === body.children.length && nodes.every((node, index) => node === body.children[index])) return;
  const focused = document.activeElement.closest("#rows tr")?.dataset.job;
  body.replaceChildren(...nodes);
  if (focused) nodes.find((node) => node.dataset.job === focused)?.querySelector("a").focus();
}

function cellsOf({ step, steps, loss: value, samplesPerSecond, etaSeconds, workers, workersWanted, preemptions, made, cost, costPerHour }, now) {
  const part = step === null || !steps ? null : Math.min(1, step / steps);
  return {
    part,
    steps: step === null ? "no step yet" : steps ? `${number(step, 0)} of ${number(steps, 0)}` : number(step, 0),
    left: etaSeconds === null ? "" : `${duration(etaSeconds)} left`,
    loss: loss(value),
    rate: samplesPerSecond === null ? dash : rate(samplesPerSecond),
    workers: `${number(workers, 0)} of ${number(workersWanted, 0)}`,
    preemptions: number(preemptions, 0),
    age: made === null ? dash : age(now - made),
    cost: money(cost),
    perHour: costPerHour === null || costPerHour === 0 ? "" : `${money(costPerHour)} an hour`,
  };
}

// In the largest unit alone: a line that changes each second is drawn anew each second.
function age(seconds) {
  if (seconds >= 172800) return plural(Math.floor(seconds / 86400), "day");
  if (seconds >= 7200) return `${number(Math.floor(seconds / 3600), 0)} h`;
  return `${number(Math.max(0, Math.floor(seconds / 60)), 0)} min`;
}

const money = (value) => (value === null ? dash : number(value, 2));

function line(row, cells) {
  const { namespace, name, state } = row;
  const told = wantsAttention(row) || state.name === "Failed" ? state.sentence : "";
  const fact = (label, value, ...more) => el("td", { role: "cell", class: value === dash && "none" }, el("span", { class: "label", "aria-hidden": "true" }, `${label} `), value, ...more);
  const small = (text) => text && el("small", {}, text);
  return el(
    "tr",
    { role: "row", "data-job": idOf(row), "data-tone": state.tone },
    el("th", { role: "rowheader", scope: "row" }, el("a", { href: `${encodeURIComponent(namespace)}/${encodeURIComponent(name)}/` }, name), el("small", {}, unseen("in namespace "), namespace)),
    el("td", { role: "cell", class: "state-cell" }, el("span", { class: "pill", "data-tone": state.tone }, state.name), small(told)),
    el("td", { role: "cell", class: "steps-cell" }, cells.part !== null && el("progress", { max: 1, value: cells.part, "aria-hidden": "true" }), el("span", {}, cells.steps), small(cells.left)),
    fact("loss", cells.loss),
    fact("samples/s", cells.rate),
    fact("workers", cells.workers),
    fact("preemptions", cells.preemptions),
    fact("age", cells.age),
    fact("cost", cells.cost, small(cells.perHour)),
  );
}
