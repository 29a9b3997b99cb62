// The prompt box: sends what is typed and shows the answer as it comes.

import { KeyWanted, call, events } from "./server.js";

const element = (id) => document.getElementById(id);
let running = null; // the AbortController of the answer in progress

/** Choose plain text where the model has no chat template; say so where the server knows no text. */
export async function prepare() {
  try {
    const info = await (await call("tokenizer_info")).json();
    if (!info.chat_template) {
      element("mode").value = "plain";
      element("mode").querySelector("[value=chat]").disabled = true;
    }
  } catch (error) {
    if (error instanceof KeyWanted) throw error;
    element("send").disabled = true;
    element("ask-error").textContent = error.message;
  }
}

function request() {
  const common = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(element("max-tokens").value),
    temperature: Number(element("temperature").value),
  };
  const text = element("prompt").value;
  return element("mode").value === "chat"
    ? ["v1/chat/completions", { ...common, messages: [{ role: "user", content: text }] }]
    : ["v1/completions", { ...common, prompt: text }];
}

async function send() {
  const answer = element("answer"), timing = element("timing");
  answer.textContent = timing.textContent = element("ask-error").textContent = "";
  const [path, body] = request();
  const beganMs = performance.now();
  let firstMs = null, usage = null, reason = null;
  const reply = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    reason = choice?.finish_reason ?? reason;
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (!text) continue;
    firstMs ??= performance.now();
    answer.append(text);
  }
  const endMs = performance.now(), count = usage?.completion_tokens;
  const parts = [reason === "length" ? "cut at the limit" : "complete"];
  if (count) parts.unshift(`${count} tokens, first after ${Math.round((firstMs ?? endMs) - beganMs)} ms`);
  if (count > 1 && firstMs !== null) parts.push(`${((count - 1) / ((endMs - firstMs) / 1000)).toFixed(1)} tokens/s`);
  timing.textContent = parts.join(", ");
}

export function connect(onKeyWanted) {
  element("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    element("send").disabled = true;
    element("stop").disabled = false;
    try {
      await send();
    } catch (error) {
      if (error.name === "AbortError") element("timing").textContent = "stopped";
      else if (error instanceof KeyWanted) onKeyWanted();
      else element("ask-error").textContent = error.message;
    }
    running = null;
    element("send").disabled = false;
    element("stop").disabled = true;
  });
  element("stop").addEventListener("click", () => running?.abort());
  element("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("prompt-form").requestSubmit();
  });
}
