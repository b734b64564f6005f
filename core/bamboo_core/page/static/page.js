// Asks for the job's document once a second and has it drawn; says so when it cannot.

import { drawCurves, watchCurves } from "./curves.js";
import { byId, clock, duration, sentenceOf, show } from "./dom.js";
import { drawParts } from "./parts.js";

const VERSION = 3;
const SECOND = 1000;
const HIDDEN_SECONDS = 15; // between two questions while nobody looks
const OVER_SECONDS = 15;
const LONGEST_PAUSE = 10; // after failures
const PATIENCE = 8 * SECOND; // for an answer
const KEY = `bamboo-token:${location.pathname}`;

let token = null;
let page = null; // the newest document
let received = 0; // when it came, by this browser's clock
let failures = 0;
let lostSince = null;
let timer = 0;
let asking = false;

// the token: it comes in the fragment, and is then kept in this tab only, out of sight

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem(KEY);
  return Boolean(given);
}

function wantToken(sentence) {
  token = null;
  sessionStorage.removeItem(KEY);
  connection("lost", "not connected");
  trouble(sentence);
  if (show(byId("ask"), true)) byId("token").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  byId("token").value = "";
  if (!token) return;
  sessionStorage.setItem(KEY, token);
  show(byId("ask"), false);
  ask();
});

addEventListener("hashchange", () => {
  if (takeToken()) {
    show(byId("ask"), false);
    ask();
  }
});

// asking

async function ask() {
  clearTimeout(timer);
  if (asking || token === null) return;
  asking = true;
  const found = await question();
  asking = false;
  let wait;
  if (found === null) wait = failed("The connection is lost");
  else if (found.ok) wait = heard(found.body);
  else wait = refused(found);
  if (wait !== null) timer = setTimeout(ask, wait * SECOND);
}

// The server's answer; null if there is none that can be read.
async function question() {
  try {
    const answer = await fetch("state", {
      headers: { Authorization: `Bearer ${token}` },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE),
    });
    return { ok: answer.ok, status: answer.status, after: Number(answer.headers.get("Retry-After")), body: await answer.json() };
  } catch {
    return null; // fetch and json fail in many ways, and all of them mean that
  }
}

function heard(found) {
  if (found.version !== VERSION) {
    connection("lost", "out of date");
    trouble("Bamboo was upgraded: load this page again.");
    return null;
  }
  const before = page;
  [page, received, failures, lostSince] = [found, Date.now(), 0, null];
  trouble("");
  const first = byId("main").hidden;
  draw();
  if (!first) announce(before, page);
  connection(page.state.over ? "over" : "live", page.state.over ? "ended" : "live");
  if (page.state.over && page.job.place === "local") return null; // nobody is there any more
  return pauseNow();
}

function draw() {
  show(byId("main"), true);
  drawParts(page);
  drawCurves(page);
}

function refused({ status, after, body }) {
  const sentence = typeof body.error === "string" ? body.error : `The server answered ${status}.`;
  if (status === 401) {
    wantToken(`${sentence} It may have expired; paste another one.`);
    return null;
  }
  if (status === 403 || status === 404) {
    connection("lost", "not shown");
    trouble(sentence);
    return LONGEST_PAUSE;
  }
  return Math.max(failed(sentence.replace(/\.$/, "")), Number.isFinite(after) ? Math.min(after, 60) : 0);
}

function failed(sentence) {
  failures += 1;
  lostSince ??= Date.now();
  const since = clock(lostSince / SECOND);
  connection("lost", `no connection since ${since}`);
  if (failures > 1 || page === null) {
    trouble(`${sentence}, since ${since}. ${page ? "The page shows the state at that time. " : ""}Trying again.`);
  }
  return Math.min(2 ** (failures - 1), LONGEST_PAUSE);
}

function pauseNow() {
  if (document.hidden) return HIDDEN_SECONDS;
  return page && page.state.over ? OVER_SECONDS : 1;
}

// what is said about it

function connection(state, text) {
  byId("connection").dataset.state = state;
  byId("connection-text").textContent = text;
}

function trouble(text) {
  const place = byId("trouble");
  if (place.textContent !== text) place.textContent = text; // an alert is read out when its text changes
  show(place, text !== "");
}

let said = [];
let saidAt = 0;

function announce(before, now) {
  if (before && before.state.name !== now.state.name) said.push(`${now.state.name}: ${now.state.sentence}`);
  const newest = before && before.marks.length ? before.marks[0].at : before ? 0 : Infinity;
  said.push(...now.marks.filter((mark) => mark.at > newest).reverse().map(sentenceOf));
  if (!said.length || Date.now() - saidAt < 4 * SECOND) return;
  byId("announcer").textContent = said.slice(-5).join(". ");
  [said, saidAt] = [[], Date.now()];
}

function tick() {
  if (page === null || failures || page.state.over) return;
  const age = (Date.now() - received) / SECOND;
  connection("live", age < 2.5 ? "live" : `updated ${duration(age)} ago`);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) ask();
});

// A page that a run has kept has its document in it, and asks nobody.
function drawKept(text) {
  page = JSON.parse(text);
  draw();
  connection("over", `kept ${clock(page.now)}`);
}

watchCurves();
if (byId("kept")) {
  drawKept(byId("kept").textContent);
} else {
  setInterval(tick, SECOND);
  takeToken();
  if (token) ask();
  else wantToken("This page needs a token: open the complete URL that was printed, or paste the token here.");
}
