// Vercel's AI SDK, unmodified, against a mesh: a run with a tool, whole and streamed, through each of its providers.
// `node outside_clients.mjs URL` where the packages are installed; prints the answers as JSON, fails by exception.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createDeepSeek } from '@ai-sdk/deepseek';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const url = process.argv[2];
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const models = {
  responses: openai.responses('v4-nano'),
  chat: openai.chat('v4-nano'),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })('claude-any-model'),
  compatible: createOpenAICompatible({ name: 'v4mesh', baseURL: `${url}/v1`, apiKey: 'none' })('v4-nano'),
  deepseek: createDeepSeek({ baseURL: url, apiKey: 'none' })('v4-nano'),
};
const get_weather = tool({
  description: 'Get the weather of a city',
  inputSchema: z.object({ city: z.string(), unit: z.string() }),
  execute: async () => '{"temp": 17, "sky": "windy"}',
});
const ask = {
  prompt: 'What is the weather in Paris in celsius?',
  tools: { get_weather },
  stopWhen: stepCountIs(3),
  temperature: 0,
  maxOutputTokens: 80,
};
const seen = {};
for (const [name, model] of Object.entries(models)) {
  const { text } = await generateText({ model, ...ask });
  let failure;
  const stream = streamText({ model, ...ask, onError: ({ error }) => { failure = error; } });
  let streamed = '';
  for await (const piece of stream.textStream) streamed += piece;
  if (failure) throw failure;
  seen[name] = { text, streamed };
}
for (const name of ['responses', 'chat']) {
  const schema = z.object({ city: z.enum(['Paris', 'Rome']), metric: z.boolean() });
  const prompt = 'Give me JSON with city Paris and metric true.';
  seen[name].object = (await generateObject({ model: models[name], schema, prompt, maxOutputTokens: 60 })).object;
}
console.log(JSON.stringify(seen));
