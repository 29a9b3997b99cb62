// The page: asks /metrics once a second and shows what has changed.

import { Chart } from "./chart.js";
import { Scrape, mean, quantiles, rate } from "./metrics.js";
import { connect, prepare } from "./prompt.js";
import { KeyWanted, call, hasKey, useKey } from "./server.js";

const PERIOD_MS = 1000, WINDOW_MS = 60_000;
const LATENCIES = {
  "Time to first token": "sglang:time_to_first_token_seconds",
  "Between tokens": "sglang:inter_token_latency_seconds",
  "Whole request": "sglang:e2e_request_latency_seconds",
  "In the queue": "sglang:queue_time_seconds",
};
const element = (id) => document.getElementById(id);
const count = (value) => (value === null ? "-" : Math.round(value).toLocaleString("en"));
const percent = (share) => (share === null ? "-" : `${(share * 100).toFixed(1)} %`);

function duration(seconds) {
  if (seconds === null) return "-";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} us`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

const charts = {
  running: new Chart(element("chart-running"), { names: ["--first", "--second"], format: count }),
  tokens: new Chart(element("chart-tokens"), { names: ["--first", "--second"], format: count }),
  step: new Chart(element("chart-step"), { names: ["--first", "--second"], format: duration }),
  kv: new Chart(element("chart-kv"), { format: percent, top: 1 }),
};
const rows = Object.entries(LATENCIES).map(([title, name]) => {
  const row = element("latencies").insertRow();
  row.insertCell().textContent = title;
  return { name, cells: [row.insertCell(), row.insertCell(), row.insertCell()] };
});
let kept = []; // answers of the last minute
let isPrepared = false;

/** Show a value; it is also there in full, for those who look closer. */
function show(id, value, format) {
  element(id).textContent = format(value);
  element(id).title = value === null ? "" : String(value);
}

function state(text, isUp) {
  element("state").textContent = text;
  element("state").className = isUp ? "up" : "down";
}

function update(now) {
  const before = kept.at(-1) ?? now, first = kept[0] ?? now;
  const isUp = now.get("phalanx:engine_up") !== 0;
  state(!isUp ? "the engine does not answer" : now.get("phalanx:paused") ? "paused" : "up", isUp);
  element("model").textContent = now.label("phalanx:engine_up", "model_name") ?? "";
  const running = now.get("sglang:num_running_reqs"), queued = now.get("sglang:num_queue_reqs");
  const out = rate(now, before, "sglang:generation_tokens_total");
  const into = rate(now, before, "sglang:prompt_tokens_total");
  const step = mean(now, before, "phalanx:step_time_seconds");
  const host = mean(now, before, "phalanx:host_time_between_steps_seconds");
  const kv = now.get("sglang:token_usage");
  show("running", running, count);
  show("queued", queued, count);
  show("tokens-out", out, count);
  show("tokens-in", into, count);
  show("step-time", step, duration);
  element("host-time").textContent = duration(host);
  show("kv", kv, percent);
  show("kv-tokens", now.get("sglang:num_used_tokens"), count);
  show("total-requests", now.get("sglang:num_requests_total"), count);
  show("total-prompt", now.get("sglang:prompt_tokens_total"), count);
  show("total-generated", now.get("sglang:generation_tokens_total"), count);
  show("total-aborted", now.get("sglang:num_aborted_requests_total"), count);
  charts.running.push([running, queued]);
  charts.tokens.push([out, into]);
  charts.step.push([step, host]);
  charts.kv.push([kv]);
  for (const { name, cells } of rows) {
    const values = quantiles(now, first, name);
    [duration(values.p50), duration(values.p99), count(values.count)].forEach((text, i) => {
      cells[i].textContent = text;
    });
  }
  kept = [...kept, now].filter((one) => now.atMs - one.atMs <= WINDOW_MS);
}

function askForKey() {
  element("key-error").textContent = hasKey() ? "That is not the key." : "";
  element("key-form").hidden = false;
  state("needs a key", false);
}

async function tick() {
  let wait = PERIOD_MS;
  try {
    const text = await (await call("metrics")).text();
    update(new Scrape(text, performance.now()));
    element("key-form").hidden = true;
    if (!isPrepared) {
      isPrepared = true;
      await prepare();
    }
  } catch (error) {
    if (error instanceof KeyWanted) {
      askForKey();
      return; // until a key is given
    }
    state("no answer", false);
    wait *= 2;
  }
  setTimeout(tick, wait);
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(element("key").value);
  element("key").value = "";
  tick();
});
connect(askForKey);
tick();
