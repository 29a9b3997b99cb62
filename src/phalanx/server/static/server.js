// Requests to the server, with its key if it wants one. Paths are relative: a proxy may add a prefix.

const STORED = "phalanx-api-key";

export class KeyWanted extends Error {}

export function useKey(key) {
  sessionStorage.setItem(STORED, key); // of this tab, until it is closed
}

export function hasKey() {
  return sessionStorage.getItem(STORED) !== null;
}

/** fetch; throws KeyWanted for a 401 and an Error with the server's own words for other failures. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(STORED);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers });
  if (reply.status === 401) throw new KeyWanted();
  if (!reply.ok) {
    const body = await reply.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered ${reply.status}`);
  }
  return reply;
}

/** The JSON of a stream's events, [DONE] left out. */
export async function* events(reply) {
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
    if (done) return;
  }
}
