// Anthropic's SDK for Node: runs the steps of standard input against a base URL, and prints what each call returns.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 120_000 });

async function call(api, { stream, ...body }) {
  if (api === "count_tokens") return client.messages.countTokens(body);
  if (!stream) return client.messages.create(body);
  const events = [];
  for await (const event of client.messages.stream(body)) events.push(event);
  return events;
}

for (const { api, body } of JSON.parse(readFileSync(0, "utf8"))) {
  let result;
  try {
    result = await call(api, body);
  } catch (error) {
    if (!(error instanceof Anthropic.APIError)) throw error;
    result = { error: error.constructor.name, message: error.message };
  }
  console.log(JSON.stringify(result));
}
