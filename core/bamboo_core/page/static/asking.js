// Polls the server for the page's document, with this tab's token if it has one, and shows connection problems.

import { byId, clock, duration, show } from "./dom.js";

const SECOND = 1000;
const HIDDEN_SECONDS = 15; // between two questions while nobody looks
const LONGEST_PAUSE = 10; // after failures
const PATIENCE = 8 * SECOND; // for an answer
const KEY = `bamboo-token:${location.pathname.replace(/\/jobs\/.*$/, "/jobs/")}`; // one for the pages of all jobs
const WANTED = "This page needs a token: open the complete URL that was printed, or paste the token here.";

let version = 0; // of the document that this page can draw
let heard = null; // takes a document in; returns { over, pause }: whether it is the last, and seconds until the next
let token = null;
let shown = false;
let over = false;
let pause = 1;
let received = 0; // when the newest document came, by this browser's clock
let failures = 0;
let lostSince = null;
let timer = 0;
let asking = false;

export function startAsking(wanted, hear) {
  [version, heard] = [wanted, hear];
  setInterval(tick, SECOND);
  takeToken();
  ask();
}

// the token: comes in the URL's fragment, is removed from the URL, and is kept in this tab's session storage only

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + location.search);
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

// requests

async function ask() {
  clearTimeout(timer);
  if (asking || heard === null || !byId("ask").hidden) return;
  asking = true;
  const found = await question();
  asking = false;
  let wait;
  if (found === null) wait = failed("The connection is lost");
  else if (found.ok) wait = take(found.body);
  else wait = refused(found);
  if (wait !== null) timer = setTimeout(ask, wait * SECOND);
}

// Returns the server's answer as {ok, status, after, body}; null if none came or it cannot be read.
async function question() {
  try {
    const answer = await fetch("state", {
      headers: token ? { Authorization: `Bearer ${token}` } : {},
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE),
    });
    const ours = (answer.headers.get("Content-Type") || "").startsWith("application/json");
    const body = ours || answer.ok ? await answer.json() : {};
    return { ok: answer.ok, status: answer.status, after: Number(answer.headers.get("Retry-After")), body };
  } catch {
    return null; // fetch and json fail in many ways, and all of them mean that
  }
}

function take(found) {
  if (found.version !== version) {
    connection("lost", "out of date");
    trouble("Bamboo was upgraded: load this page again.");
    return null;
  }
  [received, failures, lostSince] = [Date.now(), 0, null];
  trouble("");
  ({ over, pause } = heard(found));
  shown = true;
  connection(over ? "over" : "live", over ? "ended" : "live");
  if (pause === null) return null; // the run has ended, and its server with it
  return document.hidden ? Math.max(pause, HIDDEN_SECONDS) : pause;
}

function refused({ status, after, body }) {
  const sentence = typeof body.error === "string" ? body.error : `The server answered ${status}.`;
  if (status === 401) {
    wantToken(token === null ? WANTED : `${sentence} It may have expired; paste another one.`);
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
  if (failures > 1 || !shown) {
    trouble(`${sentence}, since ${since}. ${shown ? "The page shows the state at that time. " : ""}Trying again.`);
  }
  return Math.min(2 ** (failures - 1), LONGEST_PAUSE);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) ask();
});

// messages about the connection

export function connection(state, text) {
  byId("connection").dataset.state = state;
  byId("connection-text").textContent = text;
}

function trouble(text) {
  const place = byId("trouble");
  if (place.textContent !== text) place.textContent = text; // an alert is read out when its text changes
  show(place, text !== "");
}

function tick() {
  if (!shown || failures || over || byId("connection").dataset.state !== "live") return;
  const age = (Date.now() - received) / SECOND;
  connection("live", age < pause + 1.5 ? "live" : `updated ${duration(age)} ago`);
}

let said = [];
let saidAt = 0;

// Announces these sentences, after earlier ones that wait, to screen readers, at most once in four seconds.
export function announce(sentences) {
  said.push(...sentences);
  if (!said.length || Date.now() - saidAt < 4 * SECOND) return;
  byId("announcer").textContent = said.slice(-5).join(". ");
  [said, saidAt] = [[], Date.now()];
}
