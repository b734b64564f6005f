// All parts of the page except the curves; each is drawn anew only if its data has changed. Values of the coordinator
// take precedence; the job's status outlasts coordinators, and adds up what they count.

import { bar } from "./charts.js";
import { byId, changed, dash, duration, el, figure, icon, loss, median, milliseconds, moment, number, plural, rate, sentenceOf, short, show, size, unseen } from "./dom.js";

const MOST_MARKS = 60;
const PHASES = ["decide", "reform", "recompute"];

export function drawParts(page) {
  heading(page);
  summary(page);
  grid(page);
  timeline(page);
  checkpoint(page);
  memory(page);
  traffic(page);
  cost(page);
  conditions(page);
  events(page);
}

// Returns the job's progress, from its coordinator if there is one, else from the job's status.
function progressOf({ live, job, status: { training, conditions } }) {
  if (live) return live;
  const trains = conditions.some(({ type, status }) => type === "Running" && status === "True");
  return {
    step: training.step,
    steps: training.steps ?? job.steps,
    stopped_early: conditions.some(({ type, reason }) => type === "Complete" && reason === "EarlyStopped"),
    loss: training.loss,
    samples_per_second: trains ? training.samplesPerSecond : null,
    eta_seconds: trains ? training.etaSeconds : null,
  };
}

// Returns the newest evaluation, with the best one if it is known; null if there is none.
function evaluationOf({ live, job: { metric }, status: { training } }) {
  if (metric === null) return null;
  const made = live ? live.evaluations : [];
  if (!made.length) return training.evaluation;
  const [step, metrics] = made[made.length - 1];
  return { step, metrics, best: made.find(([after]) => after === live.best_evaluation) };
}

// Returns the figures of the checkpoints; null if the job keeps none. `at`: when the newest one was complete.
function checkpointOf({ live, now, job, status: { checkpoint: newest, restores } }) {
  const seen = live && live.checkpoint;
  if (!seen && !job.checkpoints) return null;
  const known = { place: job.checkpoints, every_steps: job.everySteps, step: null, writing: null, ...seen, restores };
  if (seen && seen.age !== null) return { ...known, at: Math.round(now - seen.age) };
  return { ...known, step: newest.lastStep ?? known.step, at: newest.lastTime && Date.parse(newest.lastTime) / 1000, seconds: null };
}

const pauseOf = ({ decide_ms: decide, reform_ms: reform, recompute_ms: recompute }) => decide + reform + recompute;

function heading({ job, state }) {
  if (!changed("heading", job, state)) return;
  document.title = `${job.name}: ${state.name}`;
  byId("name").textContent = job.name;
  const where = job.place === "local" ? "on this machine" : `namespace ${job.namespace}`;
  byId("place").textContent = [where, `redundancy ${job.mode}`, job.epoch && `epoch ${job.epoch}`].filter(Boolean).join(" · ");
  byId("state").dataset.tone = state.tone;
  byId("state-name").textContent = state.name;
  byId("state-sentence").textContent = state.sentence;
}

function summary(page) {
  const { live, status, marks, unknown, state, job, now, doneBy } = page;
  const [progress, measured, kept] = [progressOf(page), evaluationOf(page), checkpointOf(page)];
  const { step, steps } = progress;
  const bare = step === null || !steps;
  const bar = byId("bar");
  bar.max = bare ? 1 : steps;
  bar.value = bare ? 0 : step;
  const part = progress.stopped_early ? "stopped early" : `${number(Math.floor((100 * step) / steps), 0)} %`;
  byId("steps").textContent = bare ? "no step known yet" : `step ${number(step, 0)} of ${number(steps, 0)}, ${part}`;
  if (changed("done-by", doneBy) && show(byId("done-by"), doneBy !== "")) byId("done-by").textContent = doneBy;
  if (changed("unknown", unknown) && show(byId("unknown"), unknown.length > 0)) {
    byId("unknown").replaceChildren(...unknown.map((sentence) => el("li", {}, sentence)));
  }
  const pauses = marks.filter((mark) => mark.takeover).map((mark) => pauseOf(mark.takeover));
  const ran = job.began && !state.over ? `running for ${duration(now - job.began)}` : "";
  const unseenLosses = !live || live.preemptions < status.preemptions; // by this coordinator
  const tiles = [
    ["Loss", loss(progress.loss), progress.first_loss == null ? "" : `from ${loss(progress.first_loss)}`],
    ["Gradient norm", figure(progress.gradient_norm), progress.learning_rate == null ? "" : `learning rate ${figure(progress.learning_rate)}`],
    ["Samples/s", rate(progress.samples_per_second), progress.step_seconds == null ? "" : `step ${milliseconds(progress.step_seconds * 1000)}`],
    ["Time left", state.over ? dash : duration(progress.eta_seconds), ran],
    ["Preemptions", number(status.preemptions, 0), unseenLosses ? "" : `${number(live.notices, 0)} with notice`],
    ["Takeovers", number(status.takeovers, 0), pauses.length ? `median pause ${milliseconds(median(pauses))}` : ""],
    ["Samples left out", number(progress.lost_samples, 0), "of the committed steps"],
  ];
  const notKept = live && state.over && state.name !== "Complete" ? step - ((kept && kept.step) ?? 0) : 0;
  if (notKept > 0) tiles.push(["Steps not kept", number(notKept, 0), kept && kept.step !== null ? "since the newest checkpoint" : "no checkpoint has them"]);
  if (measured) tiles.push([`Evaluation: ${job.metric}`, figure(measured.metrics[job.metric]), best(measured, job)]);
  if (kept) tiles.push(["Checkpoint", kept.step === null ? "none yet" : `step ${number(kept.step, 0)}`, age(kept, now, state)]);
  const { total, perHour } = status.cost;
  if (total !== null) tiles.push(["Cost so far", money(total), perHour === null ? "" : `${money(perHour)} an hour`]);
  if (!changed("tiles", tiles)) return;
  byId("tiles").replaceChildren(...tiles.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("small", {}, more)))));
}

function best({ step, best: known }, { metric }) {
  const newest = `after step ${number(step, 0)}`;
  if (!known) return newest;
  return known[0] === step ? `${newest}, the best so far` : `${newest}; best ${figure(known[1][metric])} after step ${number(known[0], 0)}`;
}

function age({ at, writing }, now, { over }) {
  if (writing) return `writing step ${number(writing.step, 0)}`;
  return at === null || over ? "" : `${duration(now - at)} old`;
}

function grid({ live, owners }) {
  const known = live ? live.grid : owners.map((row) => row.map((worker) => [worker, null]));
  const ended = live && live.phase === "Over";
  const [states, slow, cells] = [new Map(live && live.workers), new Map(live && live.slow.map((one) => [one.worker, one.sentence])), new Map()];
  for (const [worker] of known.flat()) cells.set(worker, (cells.get(worker) ?? 0) + 1);
  const rows = known.map((row) =>
    row.map(([worker, held]) => ({
      worker,
      state: !live ? "unknown" : ended ? "ended" : states.get(worker) ?? "lost",
      held: ended ? null : held,
      cells: cells.get(worker),
      slow: slow.get(worker),
    })),
  );
  drawGrid(rows, live ? live.grid_choice : "");
  drawOthers(ended ? [] : [...states].filter(([worker]) => !cells.has(worker)));
}

function drawGrid(rows, choice) {
  if (!changed("grid", rows, choice)) return;
  if (show(byId("grid-choice"), choice !== "")) byId("grid-choice").textContent = `Chosen: ${choice}`;
  const wide = Math.max(0, ...rows.map((row) => row.length));
  byId("grid-caption").textContent = rows.length
    ? `Who runs which stage: ${plural(rows.length, "pipeline")} of ${plural(wide, "stage")}`
    : "No worker has a stage yet";
  const stages = [...Array(wide).keys()].map((stage) => el("th", { scope: "col", role: "columnheader" }, unseen("Stage "), el("span", { class: "wordy", "aria-hidden": "true" }, "stage "), String(stage)));
  byId("grid-head").replaceChildren(...(rows.length ? [el("tr", { role: "row" }, el("th", { scope: "col", role: "columnheader" }, unseen("Pipeline")), ...stages)] : []));
  byId("grid-body").replaceChildren(
    ...rows.map((row, pipeline) => el("tr", { role: "row" }, el("th", { scope: "row", role: "rowheader" }, unseen("Pipeline "), el("span", { class: "wordy", "aria-hidden": "true" }, "pipeline "), String(pipeline)), ...row.map(cell))),
  );
}

function cell({ worker, state, held, cells, slow }, stage) {
  const lines = [el("span", { class: "stage-of", "aria-hidden": "true" }, `stage ${stage}`), el("span", { class: "who", title: worker }, short(worker)), el("span", { class: "what" }, icon(state), state)];
  if (cells > 1) lines.push(el("span", { class: "flag double" }, `${cells} stages`));
  if (slow) lines.push(el("span", { class: "flag double", title: slow }, "slow"));
  if (held === true) lines.push(el("span", { class: "flag" }, icon("held"), "protected"));
  if (held === false) lines.push(el("span", { class: "flag bare" }, icon("bare"), "unprotected"));
  return el("td", { "data-state": state, role: "cell" }, el("div", { class: "cell" }, ...lines));
}

function drawOthers(workers) {
  if (!changed("others", workers)) return;
  show(byId("others"), workers.length > 0);
  const each = workers.map(([worker, state]) => el("span", { class: "chip", "data-state": state, title: worker }, icon(state), `${short(worker)} ${state}`));
  byId("others").replaceChildren("Other workers: ", ...each.flatMap((chip) => [chip, " "]));
}

function timeline({ marks }) {
  if (!changed("timeline", marks)) return;
  const most = Math.max(0, ...marks.map((mark) => (mark.takeover ? pauseOf(mark.takeover) : 0)));
  const left = marks.length - MOST_MARKS;
  byId("timeline-note").textContent = marks.length ? (left > 0 ? `The newest ${MOST_MARKS} of ${marks.length}.` : "") : "No worker has been lost or given notice.";
  show(byId("timeline-scroll"), marks.length > 0);
  byId("timeline-list").replaceChildren(...marks.slice(0, MOST_MARKS).map((mark) => el("li", { class: mark.kind }, icon(mark.kind), moment(mark.at), happening(mark, most))));
}

function happening(mark, most) {
  const taken = mark.takeover;
  const text = el("div", { class: "told" }, el("p", {}, sentenceOf(mark)));
  if (!taken) return text;
  const facts = [`pause ${milliseconds(pauseOf(taken))}`, `step ${taken.step}`];
  facts.push(taken.notice ? "with notice" : `${plural(taken.forwards, "forward")} and ${plural(taken.backwards, "backward")} repeated`);
  text.append(el("p", { class: "facts-line" }, facts.join(" · ")));
  const parts = PHASES.map((name) => ({ name, value: taken[`${name}_ms`], word: milliseconds(taken[`${name}_ms`]) }));
  text.append(...bar(parts, most));
  text.append(el("p", { class: "key", "aria-hidden": "true" }, ...parts.flatMap(({ name, word }) => [el("span", { class: "pair" }, el("span", { class: "swatch", "data-part": name }), `${name} ${word}`), " "])));
  return text;
}

function checkpoint(page) {
  const { now, state } = page;
  const kept = checkpointOf(page);
  if (!show(byId("checkpoint"), kept !== null)) return;
  const { step, at, writing, counts } = kept;
  const facts = [["Newest", step === null ? "none yet" : at === null ? `step ${number(step, 0)}` : el("span", {}, `step ${number(step, 0)}, `, moment(at))]];
  if (at !== null && !state.over) facts.push(["Age", duration(now - at)]);
  if (kept.seconds !== null) facts.push(["Written", `${size(kept.bytes)} in ${milliseconds(1000 * kept.seconds)}`]);
  if (writing) facts.push(["Being written", `step ${number(writing.step, 0)}, ${number(writing.written, 0)} of ${plural(writing.layers, "layer")}, for ${duration(writing.seconds)}`]);
  facts.push(["Interval", plural(kept.every_steps, "step")], ["Place", kept.place]);
  if (kept.restores) facts.push(["Gone back to one", plural(kept.restores, "time")]);
  if (counts && counts.repeated) facts.push(["Repeated steps", `${number(counts.repeated, 0)} (${duration(counts.repeated_seconds)})`]);
  if (!changed("checkpoint", facts.map(([name, value]) => [name, typeof value === "string" ? value : value.textContent]))) return;
  byId("checkpoint-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function memory({ live }) {
  const found = live ? live.memory : [];
  if (!changed("memory", found) || !show(byId("memory"), found.length > 0)) return;
  byId("memory-body").replaceChildren(
    ...found.map(([worker, { peak, limit }]) =>
      el("tr", {}, el("th", { scope: "row", title: worker }, short(worker)), el("td", {}, size(peak)), el("td", {}, size(limit))),
    ),
  );
}

function traffic({ live }) {
  const found = live ? live.traffic.map(([worker, kinds]) => ({ worker, kinds, total: Object.values(kinds).reduce((a, b) => a + b, 0) })) : [];
  if (!changed("traffic", found) || !show(byId("traffic"), found.length > 0)) return;
  const used = Object.keys(found[0].kinds).filter((kind) => found.some(({ kinds }) => kinds[kind]));
  const most = Math.max(...found.map(({ total }) => total));
  byId("traffic-head").replaceChildren(
    el("tr", {}, el("th", { scope: "col" }, "Worker"), el("th", { scope: "col" }, "Total"), el("th", { scope: "col", class: "barred" }, unseen("Shares")), ...used.map((kind) => el("th", { scope: "col" }, el("span", { class: "swatch", "data-part": kind, "aria-hidden": "true" }), kind))),
  );
  byId("traffic-body").replaceChildren(
    ...found.map(({ worker, total, kinds }) => {
      const parts = used.map((name) => ({ name, value: kinds[name], word: size(kinds[name]) }));
      const [picture] = bar(parts, most);
      return el("tr", {}, el("th", { scope: "row", title: worker }, short(worker)), el("td", {}, size(total)), el("td", { class: "barred" }, picture), ...parts.map(({ word }) => el("td", {}, word)));
    }),
  );
}

const money = (amount) => number(Number(amount), Number(amount) && Math.abs(amount) < 1 ? 4 : 2);

function cost({ pools, costAtEnd, status: { cost: { total, perHour } } }) {
  if (!changed("cost", pools, costAtEnd, total, perHour) || !show(byId("cost"), pools.length > 0)) return;
  const unpriced = pools.filter(({ price }) => price === null).map(({ name }) => name);
  const note = byId("cost-note");
  note.textContent = unpriced.length === pools.length ? "No price is given: set pricePerHour in the job's nodePools." : `Not included is what has no price: pool ${unpriced.join(", ")}.`;
  show(note, unpriced.length > 0);
  const facts = [];
  if (total !== null) facts.push(["Paid so far", money(total)]);
  if (perHour !== null) facts.push(["Now, an hour", money(perHour)]);
  if (costAtEnd !== null) facts.push(["With the last step, if it goes on like this", `about ${money(costAtEnd)}`]);
  byId("cost-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  byId("cost-body").replaceChildren(...pools.map(({ name, capacity, workers, price }) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, capacity), el("td", {}, String(workers)), el("td", {}, price ?? "not given"))));
}

function conditions({ status: { conditions: all } }) {
  if (!changed("conditions", all) || !show(byId("conditions"), all.length > 0)) return;
  byId("conditions-body").replaceChildren(
    ...all.map(({ type, status, reason, message }) => el("tr", {}, el("th", { scope: "row" }, type), el("td", {}, status), el("td", {}, reason), el("td", { class: "text" }, message))),
  );
}

function events({ events: all }) {
  if (!changed("events", all)) return;
  byId("events-body").replaceChildren(
    ...(all.length ? all : [[null, { reason: "", message: "No events yet." }]]).map(([at, { reason, message, warning }]) =>
      el(
        "tr",
        { role: "row", class: warning && "warning" },
        el("td", { role: "cell" }, at === null ? "" : moment(at)),
        el("th", { role: "rowheader", scope: "row" }, warning && icon("notice"), warning && unseen("Warning: "), reason),
        el("td", { role: "cell", class: "text" }, message),
      ),
    ),
  );
}
