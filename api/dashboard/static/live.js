// Keeps a job's page alive: one event stream says that something happened, htmx refreshes the parts that show it.
// Everything on the page works without this file; it only saves reloading.
"use strict";

const PROGRESS_MS = 700;   // at most one refresh of the Gantt in this time
const RESULT_MS = 300;     // results wait a moment, so that a burst of events is one refresh
const LOG_MS = 1000;
const LOG_LIMIT = 400000;  // characters kept in the pane

document.documentElement.classList.add("js");
const $ = (id) => document.getElementById(id);

// ---- the job's events -------------------------------------------------------------------------------------------
function throttled(action, delay) {
  let timer = 0;
  return () => { if (!timer) timer = setTimeout(() => { timer = 0; action(); }, delay); };
}

const live = $("live");
const ended = () => !["queued", "running"].includes($("title").dataset.state);

if (live && !ended()) {   // a job that has ended changes only by retry, which loads the page anew
  const refreshAll = throttled(() => htmx.trigger(live, "refresh-all"), RESULT_MS);
  const refreshProgress = throttled(() => htmx.trigger($("live-progress"), "refresh-progress"), PROGRESS_MS);
  const source = new EventSource(`${live.dataset.events}?after=${live.dataset.after}`);
  for (const kind of ["job", "step", "artifact"]) source.addEventListener(kind, refreshAll);
  source.addEventListener("progress", refreshProgress);
  source.addEventListener("metric", () => ($("panel").dataset.name === "training" ? refreshAll : refreshProgress)());
  source.addEventListener("end", () => { source.close(); refreshAll(); });
  // Running bars grow although nothing happens.
  setInterval(() => { if (!ended() && !document.hidden) refreshProgress(); }, 2000);
}

// Open details and the sideways scroll of tables survive a refresh.
const kept = { open: new Set(), scroll: [] };
document.body.addEventListener("htmx:beforeSwap", () => {
  kept.open = new Set([...document.querySelectorAll("#panel details[open]")].map((item) => item.id));
  kept.scroll = [...document.querySelectorAll("#panel .scroll")].map((item) => item.scrollLeft);
});
document.body.addEventListener("htmx:afterRequest", () => {
  for (const id of kept.open) if (id && $(id)) $(id).open = true;
  document.querySelectorAll("#panel .scroll").forEach((item, index) => { item.scrollLeft = kept.scroll[index] || 0; });
  showLog();
});

// ---- the log pane -----------------------------------------------------------------------------------------------
const log = $("log");
const state = { url: "", offset: 0, text: "", paused: false, busy: false };

function draw() {
  const wanted = $("log-filter").value.toLowerCase();
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 24;
  const lines = wanted ? state.text.split("\n").filter((line) => line.toLowerCase().includes(wanted)) : null;
  log.textContent = lines ? lines.join("\n") : state.text;   // textContent: a log is never markup
  $("log-empty").hidden = state.text !== "";
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function showLog() {
  const head = $("log-head");
  if (!log || !head || head.dataset.url === state.url) return;
  const first = state.url === "";
  state.url = head.dataset.url;
  state.offset = first ? Number(log.dataset.next) : 0;
  state.text = first ? log.textContent : "";
  draw();
  if (first) log.scrollTop = log.scrollHeight;
  readLog();
}

async function readLog() {
  if (state.busy || state.paused || !state.url) return;
  state.busy = true;
  const url = state.url;
  try {
    const answer = await fetch(`${url}&offset=${state.offset}`);
    if (answer.ok && url === state.url) {
      const text = await answer.text();
      state.offset = Number(answer.headers.get("Onboard-Next-Offset"));
      if (text) { state.text = (state.text + text).slice(-LOG_LIMIT); draw(); }
    }
  } catch (error) {
    // The service is away; the next turn asks again.
  } finally {
    state.busy = false;
  }
}

if (log) {
  $("log-filter").addEventListener("input", draw);
  $("log-pause").addEventListener("click", (event) => {
    state.paused = !state.paused;
    event.target.textContent = state.paused ? "Resume" : "Pause";
    event.target.setAttribute("aria-pressed", String(state.paused));
    readLog();
  });
  document.body.addEventListener("change", (event) => { if (event.target.closest(".operators")) event.target.form.submit(); });
  showLog();
  let rest = 3;   // a job that has ended may still have a last line on its way
  setInterval(() => { if (!ended()) rest = 3; if (rest > 0 && !document.hidden) { readLog(); if (ended()) rest -= 1; } }, LOG_MS);
}

// ---- keys -------------------------------------------------------------------------------------------------------
function moveJob(by) {
  const links = [...document.querySelectorAll("#jobs a")];
  if (!links.length) return;
  const now = links.indexOf(document.activeElement);
  const here = now >= 0 ? now : links.findIndex((link) => link.hasAttribute("aria-current"));
  links[Math.max(0, Math.min(links.length - 1, here < 0 ? 0 : here + by))].focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "j" || event.key === "k") moveJob(event.key === "j" ? 1 : -1);
  else if (event.key === "/" && $("search")) { event.preventDefault(); $("search").focus(); }
  else if (/^[1-9]$/.test(event.key)) document.querySelector(`.tabs [data-tab="${event.key}"]`)?.click();
});
