// rate-limiter-flexible on ioredis, for benchmarks/second_calls.py: many tasks call consume(key).
// Reads jobs from stdin, one JSON object in a line, and answers each with a line on stdout.

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const require = createRequire(import.meta.url);
const { Redis } = require('ioredis');
const { RateLimiterRedis } = require('rate-limiter-flexible');

const version = (name) => require(`${name}/package.json`).version;
const port = Number(process.argv[2]);
const CALLS_OF_ONE_KEY = 50;

function open(pipelining) {
  const client = new Redis({ port, host: '127.0.0.1', enableAutoPipelining: pipelining });
  const keyPrefix = `rlflx:${pipelining}`;
  return new RateLimiterRedis({ storeClient: client, points: 1e8, duration: 60, keyPrefix });
}

const limiters = new Map([false, true].map((pipelining) => [pipelining, open(pipelining)]));

// Returns the µs of processor time of one call of tasks that share the keys.
async function cpuOfCall({ keys, tasks, seconds, pipelining }) {
  const limiter = limiters.get(pipelining);
  const names = Array.from({ length: keys }, (_, number) => `user:${number}`);
  let made = 0;

  async function work(own) {
    while (performance.now() < end) {
      for (const key of own) {
        await limiter.consume(key); // rejects if the call is refused
      }
      made += own.length;
    }
  }

  const part = (task) =>
    keys < tasks
      ? Array(CALLS_OF_ONE_KEY).fill(names).flat()
      : names.filter((_, number) => number % tasks === task);
  const parts = Array.from({ length: tasks }, (_, task) => part(task));
  const end = performance.now() + seconds * 1000;
  const before = process.cpuUsage();
  await Promise.all(parts.map(work));
  const { user, system } = process.cpuUsage(before);
  return (user + system) / made;
}

function answer(found) {
  process.stdout.write(`${JSON.stringify(found)}\n`);
}

answer({
  versions: `rate-limiter-flexible ${version('rate-limiter-flexible')}, ` +
    `ioredis ${version('ioredis')}, Node ${process.versions.node}`,
});
for await (const line of createInterface({ input: process.stdin })) {
  try {
    answer({ cpu_us: await cpuOfCall(JSON.parse(line)) });
  } catch (error) {
    answer({ error: String(error.message ?? JSON.stringify(error)) });
  }
}
process.exit(0);
