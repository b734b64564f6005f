// The parts of the page but the curves: each draws what the document says, if that has changed.

import { bar } from "./charts.js";
import { byId, changed, dash, duration, el, figure, icon, loss, median, milliseconds, moment, number, plural, rate, sentenceOf, show, size, unseen } from "./dom.js";

const MOST_MARKS = 60;
const PHASES = ["decide", "reform", "recompute"];

export function drawParts(page) {
  heading(page);
  summary(page);
  grid(page);
  others(page);
  timeline(page);
  checkpoint(page);
  memory(page.memory);
  traffic(page.traffic);
  cost(page);
  conditions(page);
  events(page);
}

function heading({ job, state, epoch }) {
  if (!changed("heading", job, state, epoch)) return;
  document.title = `${job.name}: ${state.name}`;
  byId("name").textContent = job.name;
  const where = job.place === "local" ? "on this machine" : `namespace ${job.namespace}`;
  byId("place").textContent = [where, job.mode && `redundancy ${job.mode}`, epoch && `epoch ${epoch}`].filter(Boolean).join(" · ");
  byId("state").dataset.tone = state.tone;
  byId("state-name").textContent = state.name;
  byId("state-sentence").textContent = state.sentence;
}

function summary({ progress, counts, marks, evaluation: measured, checkpoint: kept, cost: paid, unknown, state, job, now }) {
  const { step, steps, stoppedEarly } = progress;
  const bare = step === null || !steps;
  const bar = byId("bar");
  bar.max = bare ? 1 : steps;
  bar.value = bare ? 0 : step;
  const part = stoppedEarly ? "stopped early" : `${number(Math.floor((100 * step) / steps), 0)} %`;
  byId("steps").textContent = bare ? "no step known yet" : `step ${number(step, 0)} of ${number(steps, 0)}, ${part}`;
  if (changed("done-by", progress.doneBy) && show(byId("done-by"), progress.doneBy !== "")) byId("done-by").textContent = progress.doneBy;
  if (changed("unknown", unknown) && show(byId("unknown"), unknown.length > 0)) {
    byId("unknown").replaceChildren(...unknown.map((sentence) => el("li", {}, sentence)));
  }
  const pauses = marks.filter((mark) => mark.takeover).map((mark) => mark.takeover.pause);
  const ran = job.began && !state.over ? `running for ${duration(now - job.began)}` : "";
  const tiles = [
    ["Loss", loss(progress.loss), progress.firstLoss === null ? "" : `from ${loss(progress.firstLoss)}`],
    ["Gradient norm", figure(progress.gradientNorm), progress.learningRate === null ? "" : `learning rate ${figure(progress.learningRate)}`],
    ["Samples/s", rate(progress.samplesPerSecond), progress.stepSeconds === null ? "" : `step ${milliseconds(progress.stepSeconds * 1000)}`],
    ["Time left", state.over ? dash : duration(progress.etaSeconds), ran],
    ["Preemptions", number(counts.preemptions, 0), counts.notices === null ? "" : `${number(counts.notices, 0)} with notice`],
    ["Takeovers", number(counts.takeovers, 0), pauses.length ? `median pause ${milliseconds(median(pauses))}` : ""],
    ["Samples left out", number(progress.lostSamples, 0), "of the committed steps"],
  ];
  if (progress.notKept) tiles.push(["Steps not kept", number(progress.notKept, 0), kept && kept.step !== null ? "since the newest checkpoint" : "no checkpoint has them"]);
  if (measured) tiles.push([`Evaluation: ${measured.metric}`, figure(measured.metrics[measured.metric]), best(measured)]);
  if (kept) tiles.push(["Checkpoint", kept.step === null ? "none yet" : `step ${number(kept.step, 0)}`, age(kept, now, state)]);
  if (paid && paid.total !== null) tiles.push(["Cost so far", money(paid.total), paid.perHour === null ? "" : `${money(paid.perHour)} an hour`]);
  if (!changed("tiles", tiles)) return;
  byId("tiles").replaceChildren(...tiles.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("small", {}, more)))));
}

function best({ step, metric, bestStep, bestMetrics }) {
  const newest = `after step ${number(step, 0)}`;
  if (bestStep === null) return newest;
  return bestStep === step ? `${newest}, the best so far` : `${newest}; best ${figure(bestMetrics[metric])} after step ${number(bestStep, 0)}`;
}

function age({ at, writing }, now, { over }) {
  if (writing) return `writing step ${number(writing.step, 0)}`;
  return at === null || over ? "" : `${duration(now - at)} old`;
}

function grid({ grid: rows, progress: { gridChoice } }) {
  if (!changed("grid", rows, gridChoice)) return;
  if (show(byId("grid-choice"), gridChoice !== "")) byId("grid-choice").textContent = `Chosen: ${gridChoice}`;
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

function cell({ worker, label, state, protected: held, cells, slow }, stage) {
  const lines = [el("span", { class: "stage-of", "aria-hidden": "true" }, `stage ${stage}`), el("span", { class: "who", title: worker }, label), el("span", { class: "what" }, icon(state), state)];
  if (cells > 1) lines.push(el("span", { class: "flag double" }, `${cells} stages`));
  if (slow) lines.push(el("span", { class: "flag double", title: slow }, "slow"));
  if (held === true) lines.push(el("span", { class: "flag" }, icon("held"), "protected"));
  if (held === false) lines.push(el("span", { class: "flag bare" }, icon("bare"), "unprotected"));
  return el("td", { "data-state": state, role: "cell" }, el("div", { class: "cell" }, ...lines));
}

function others({ others: workers }) {
  if (!changed("others", workers)) return;
  show(byId("others"), workers.length > 0);
  const each = workers.map(({ worker, label, state }) => el("span", { class: "chip", "data-state": state, title: worker }, icon(state), `${label} ${state}`));
  byId("others").replaceChildren("Other workers: ", ...each.flatMap((chip) => [chip, " "]));
}

function timeline({ marks }) {
  if (!changed("timeline", marks)) return;
  const most = Math.max(0, ...marks.map((mark) => (mark.takeover ? mark.takeover.pause : 0)));
  const left = marks.length - MOST_MARKS;
  byId("timeline-note").textContent = marks.length ? (left > 0 ? `The newest ${MOST_MARKS} of ${marks.length}.` : "") : "No worker has been lost or given notice.";
  show(byId("timeline-scroll"), marks.length > 0);
  byId("timeline-list").replaceChildren(...marks.slice(0, MOST_MARKS).map((mark) => el("li", { class: mark.kind }, icon(mark.kind), moment(mark.at), happening(mark, most))));
}

function happening(mark, most) {
  const taken = mark.takeover;
  const text = el("div", { class: "told" }, el("p", {}, sentenceOf(mark)));
  if (!taken) return text;
  const facts = [`pause ${milliseconds(taken.pause)}`];
  if (taken.step !== null) facts.push(`step ${taken.step}`);
  if (taken.notice) facts.push("with notice");
  if (taken.forwards !== null && !taken.notice) facts.push(`${plural(taken.forwards, "forward")} and ${plural(taken.backwards, "backward")} repeated`);
  text.append(el("p", { class: "facts-line" }, facts.join(" · ")));
  if (taken.decide === null) return text;
  const parts = PHASES.map((name) => ({ name, value: taken[name], word: milliseconds(taken[name]) }));
  text.append(...bar(parts, most));
  text.append(el("p", { class: "key", "aria-hidden": "true" }, ...parts.flatMap(({ name, word }) => [el("span", { class: "pair" }, el("span", { class: "swatch", "data-part": name }), `${name} ${word}`), " "])));
  return text;
}

function checkpoint({ checkpoint: kept, now, state }) {
  if (!show(byId("checkpoint"), kept !== null)) return;
  const facts = [["Newest", kept.step === null ? "none yet" : kept.at === null ? `step ${number(kept.step, 0)}` : el("span", {}, `step ${number(kept.step, 0)}, `, moment(kept.at))]];
  if (kept.at !== null && !state.over) facts.push(["Age", duration(now - kept.at)]);
  if (kept.seconds !== null) facts.push(["Written", `${size(kept.bytes)} in ${milliseconds(1000 * kept.seconds)}`]);
  if (kept.writing) facts.push(["Being written", `step ${number(kept.writing.step, 0)}, ${number(kept.writing.written, 0)} of ${plural(kept.writing.layers, "layer")}, for ${duration(now - kept.writing.since)}`]);
  facts.push(["Interval", plural(kept.everySteps, "step")], ["Place", kept.place]);
  if (kept.restores || kept.repeated) facts.push(["Gone back to one", plural(kept.restores, "time")], ["Repeated steps", repeated(kept)]);
  if (!changed("checkpoint", facts.map(([name, value]) => [name, typeof value === "string" ? value : value.textContent]))) return;
  byId("checkpoint-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function repeated({ repeated: steps, repeatedSeconds: seconds }) {
  return seconds ? `${number(steps, 0)} (${duration(seconds)})` : number(steps, 0);
}

function memory(found) {
  if (!changed("memory", found) || !show(byId("memory"), found.length > 0)) return;
  byId("memory-body").replaceChildren(
    ...found.map(({ worker, label, peak, limit }) =>
      el("tr", {}, el("th", { scope: "row", title: worker }, label), el("td", {}, size(peak)), el("td", {}, size(limit))),
    ),
  );
}

function traffic(found) {
  if (!changed("traffic", found) || !show(byId("traffic"), found.length > 0)) return;
  const used = Object.keys(found[0].kinds).filter((kind) => found.some((account) => account.kinds[kind]));
  const most = Math.max(...found.map((account) => account.total));
  byId("traffic-head").replaceChildren(
    el("tr", {}, el("th", { scope: "col" }, "Worker"), el("th", { scope: "col" }, "Total"), el("th", { scope: "col", class: "barred" }, unseen("Shares")), ...used.map((kind) => el("th", { scope: "col" }, el("span", { class: "swatch", "data-part": kind, "aria-hidden": "true" }), kind))),
  );
  byId("traffic-body").replaceChildren(
    ...found.map(({ worker, label, total, kinds }) => {
      const parts = used.map((name) => ({ name, value: kinds[name], word: size(kinds[name]) }));
      const [picture] = bar(parts, most);
      return el("tr", {}, el("th", { scope: "row", title: worker }, label), el("td", {}, size(total)), el("td", { class: "barred" }, picture), ...parts.map(({ word }) => el("td", {}, word)));
    }),
  );
}

const money = (value) => number(value, value !== 0 && Math.abs(value) < 1 ? 4 : 2);

function cost({ cost: paid }) {
  if (!changed("cost", paid) || !show(byId("cost"), paid !== null)) return;
  const note = byId("cost-note");
  note.textContent = paid.sentence;
  show(note, paid.sentence !== "");
  const facts = [];
  if (paid.total !== null) facts.push(["Paid so far", money(paid.total)]);
  if (paid.perHour !== null) facts.push(["Now, an hour", money(paid.perHour)]);
  if (paid.atEnd !== null) facts.push(["With the last step, if it goes on like this", `about ${money(paid.atEnd)}`]);
  byId("cost-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  show(byId("cost-table"), paid.pools.length > 0);
  byId("cost-body").replaceChildren(...paid.pools.map(({ name, capacity, workers, price }) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, capacity), el("td", {}, String(workers)), el("td", {}, price ?? "not given"))));
}

function conditions({ conditions: all }) {
  if (!changed("conditions", all) || !show(byId("conditions"), all.length > 0)) return;
  byId("conditions-body").replaceChildren(
    ...all.map(({ type, status, reason, message }) => el("tr", { "data-holds": status }, el("th", { scope: "row" }, type), el("td", {}, status), el("td", {}, reason), el("td", { class: "text" }, message))),
  );
}

function events({ events: all }) {
  if (!changed("events", all)) return;
  byId("events-body").replaceChildren(
    ...(all.length ? all : [{ at: null, reason: "", message: "No events yet." }]).map(({ at, reason, message, warning }) =>
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
