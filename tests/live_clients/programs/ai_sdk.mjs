// Vercel's AI SDK with its providers for OpenAI, compatible servers and Anthropic: its own calls, each whole and streamed.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";

const [{ api }] = JSON.parse(readFileSync(0, "utf8"));
const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = (includeUsage) => createOpenAICompatible({ name: "router", baseURL, includeUsage });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const prompt = "Write the numbers from one to twenty in words.";
const greedy = { prompt, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const tools = {
  read: ai.tool({ description: "Reads a page.", inputSchema: ai.jsonSchema({ type: "object", properties: {} }) }),
};

async function* generation() {
  const models = {
    chat: openai.chat("tiny"),
    responses: openai.responses("tiny"),
    completion: openai.completion("tiny"),
    compatible: compatible(false)("tiny"),
    "compatible with usage": compatible(true)("tiny"),
    messages: anthropic("tiny"),
  };
  for (const [name, model] of Object.entries(models)) {
    for (const more of name === "completion" ? [{}] : [{}, { tools }]) {
      yield async () => {
        const { text, usage, finishReason } = await ai.generateText({ model, ...greedy, ...more });
        return { name, text, usage, finishReason };
      };
      yield async () => {
        const parts = [];
        for await (const part of (ai.streamText({ model, ...greedy, ...more, onError() {} })).fullStream) {
          if (part.type === "text-delta" || part.type === "error") parts.push(part.text ?? String(part.error));
        }
        return { name, parts };
      };
    }
  }
}

async function* embeddings() {
  for (const model of [openai.embedding("tiny"), compatible(false).embeddingModel("tiny")]) {
    yield async () => (await ai.embedMany({ model, values: [prompt, "Another one."], maxRetries: 0 })).embeddings;
  }
}

async function* audio() {
  const bytes = Buffer.concat([Buffer.from("RIFF"), ...Array(64).fill(Buffer.from(Array.from({ length: 256 }, (_, at) => at)))]);
  const speech = ai.generateSpeech ?? ai.experimental_generateSpeech;
  const transcribe = ai.transcribe ?? ai.experimental_transcribe;
  yield async () => (await speech({ model: openai.speech("tiny"), text: prompt, outputFormat: "mp3", maxRetries: 0 })).audio.base64;
  yield async () => (await transcribe({ model: openai.transcription("tiny"), audio: bytes, maxRetries: 0 })).text;
}

for await (const call of { embeddings, speech: audio }[api]?.() ?? generation()) {
  let result;
  try {
    result = await call();
  } catch (error) {
    result = { error: error.name, message: error.message };
  }
  console.log(JSON.stringify(result));
}
