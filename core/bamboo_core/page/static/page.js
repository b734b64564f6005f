// The entry point: draws the job's document, once a second or from the page itself.

import { announce, connection, startAsking } from "./asking.js";
import { drawCurves, watchCurves } from "./curves.js";
import { byId, clock, sentenceOf, show } from "./dom.js";
import { drawParts } from "./parts.js";

const VERSION = 4;
const OVER_SECONDS = 15;

let page = null; // the newest document

function draw() {
  show(byId("main"), true);
  drawParts(page);
  drawCurves(page);
}

function heard(found) {
  const before = page;
  page = found;
  draw();
  if (before) announce(news(before, page));
  const { over } = page.state;
  const nobodyLeft = over && page.job.place === "local";
  return { over, pause: nobodyLeft ? null : over ? OVER_SECONDS : 1 };
}

function news(before, now) {
  const newest = before.marks.length ? before.marks[0].at : 0;
  const told = now.marks.filter((mark) => mark.at > newest).reverse().map(sentenceOf);
  return before.state.name === now.state.name ? told : [`${now.state.name}: ${now.state.sentence}`, ...told];
}

// Draws a standalone page, which a run has saved with its document inside, without a server.
function drawKept(text) {
  page = JSON.parse(text);
  draw();
  connection("over", `kept ${clock(page.now)}`);
}

watchCurves();
if (byId("kept")) drawKept(byId("kept").textContent);
else startAsking(VERSION, heard);
