// OpenAI's SDK for Node: runs the steps of standard input against a base URL, and prints what each call returns.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const content = Buffer.concat([Buffer.from("RIFF"), ...Array(64).fill(Buffer.from(Array.from({ length: 256 }, (_, at) => at)))]);
const file = () => toFile(content, "note.wav", { type: "audio/wav" });
const calls = {
  chat: (body) => client.chat.completions.create(body),
  completions: (body) => client.completions.create(body),
  responses: (body) => client.responses.create(body),
  embeddings: (body) => client.embeddings.create(body),
  speech: async (body) => {
    const answer = await client.audio.speech.create(body);
    return createHash("sha256").update(Buffer.from(await answer.arrayBuffer())).digest("hex");
  },
  transcription: async (body) => client.audio.transcriptions.create({ ...body, file: await file() }),
  file: async (body) => client.files.create({ ...body, file: await file() }),
};

for (const { api, body } of JSON.parse(readFileSync(0, "utf8"))) {
  let result;
  try {
    result = await calls[api](body);
    if (body.stream) {
      const chunks = [];
      for await (const chunk of result) chunks.push(chunk);
      result = chunks;
    }
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    result = { error: error.constructor.name, message: error.message };
  }
  console.log(JSON.stringify(result));
}
