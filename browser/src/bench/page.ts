/** The page of `embrace bench browser`: asks for orders, has them done by a worker for each column, and answers. */
import { adapterName } from "../edge_runtime/gpu.ts";
import { messageOf } from "../federation/errors.ts";
import type { Answer, Order } from "./orders.ts";

const columns = new Map<string, Worker>();

async function obey(order: Exclude<Order, { do: "end" }>): Promise<Answer> {
  if (order.do === "look") {
    const { userAgent, hardwareConcurrency } = navigator;
    return { userAgent, processors: hardwareConcurrency, isolated: crossOriginIsolated, adapter: await adapterName() };
  }
  if (order.do === "load") {
    columns.get(order.column)?.terminate(); // with its runtime, whose memory never shrinks
    columns.set(order.column, new Worker(new URL("./worker.ts", import.meta.url), { type: "module", name: "embrace bench" }));
  }
  const worker = columns.get(order.column)!;
  const answer = new Promise<Answer>((resolve) => {
    worker.onmessage = ({ data }: MessageEvent<Answer>) => resolve(data);
    worker.onerror = (event) => resolve({ error: event.message || "the worker could not start" });
  });
  worker.postMessage(order);
  return { ...(await answer), sinceOpened: performance.now(), pageBytes: transferred() };
}

/** Bytes that came over the network for the page itself. */
function transferred(): number {
  const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")] as PerformanceResourceTiming[];
  return entries.reduce((sum, { transferSize }) => sum + transferSize, 0);
}

async function main(): Promise<void> {
  let body = "{}";
  for (;;) {
    const answer = await fetch("/bench/next", { method: "POST", body, headers: { "Content-Type": "application/json" } });
    const order = (await answer.json()) as Order;
    if (!answer.ok || order.do === "end") return;
    body = JSON.stringify(await obey(order).catch((error: unknown) => ({ error: messageOf(error) })));
  }
}

void main();
