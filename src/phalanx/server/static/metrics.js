// Prometheus' text format, and what is computed from two answers.

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function number(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

function unescape(text) {
  return text.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
}

/** One answer of /metrics. */
export class Scrape {
  constructor(text, atMs) {
    this.atMs = atMs;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const match = SAMPLE.exec(line);
      if (!match) continue;
      const labels = {};
      for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = unescape(value);
      if (!this.samples.has(match[1])) this.samples.set(match[1], []);
      this.samples.get(match[1]).push({ labels, value: number(match[3]) });
    }
  }

  /** The sum of a metric's samples, or null where there are none. */
  get(name) {
    const found = this.samples.get(name);
    return found ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
  }

  label(name, label) {
    return this.samples.get(name)?.[0]?.labels[label] ?? null;
  }

  /** [[bound, count up to it], ...] of a histogram. */
  buckets(name) {
    const found = this.samples.get(`${name}_bucket`) ?? [];
    return found.map((sample) => [number(sample.labels.le), sample.value]);
  }
}

/** How much a total has grown; null if it is not told, or if the server was started anew. */
function growth(now, before, name) {
  const late = now.get(name), early = before.get(name);
  return late === null || early === null || late < early ? null : late - early;
}

export function rate(now, before, name) {
  const grown = growth(now, before, name), seconds = (now.atMs - before.atMs) / 1000;
  return grown === null || seconds <= 0 ? null : grown / seconds;
}

/** Mean in seconds of what a histogram recorded in between; null where that is nothing. */
export function mean(now, before, name) {
  const sum = growth(now, before, `${name}_sum`), count = growth(now, before, `${name}_count`);
  return sum === null || !count ? null : sum / count;
}

/** {count, p50, p99} in seconds of what a histogram recorded in between. */
export function quantiles(now, before, name) {
  const late = now.buckets(name), early = before.buckets(name);
  const counts = late.map(([, count], i) => count - (early.length === late.length ? early[i][1] : 0));
  const total = counts.at(-1) ?? 0;
  if (!(total > 0) || counts.some((count) => count < 0)) return { count: 0, p50: null, p99: null };
  const at = (q) => {
    const i = counts.findIndex((count) => count >= q * total);
    if (i === late.length - 1) return late[i - 1][0];
    const high = late[i][0], low = i ? late[i - 1][0] : high / 1.26, below = i ? counts[i - 1] : 0;
    return low * (high / low) ** ((q * total - below) / (counts[i] - below));
  };
  return { count: total, p50: at(0.5), p99: at(0.99) };
}
