/** The agent's own thread: training never blocks the page. It takes what it needs from the storage. */
import { coverage } from "../federation/coverage.ts";
import { messageOf, OutOfMemory } from "../federation/errors.ts";
import { Agent } from "../edge_runtime/agent.ts";
import { benchBoundary } from "../edge_runtime/bench.ts";
import { Declined, DeviceClient } from "../edge_runtime/client.ts";
import { inFile, removeLeftovers } from "../edge_runtime/file_room.ts";
import { adapterName } from "../edge_runtime/gpu.ts";
import { heapBytes, watchHeap } from "../edge_runtime/heap.ts";
import { RemoteBundle } from "../edge_runtime/remote.ts";
import { loadForPage } from "../edge_runtime/runtime_files.ts";
import { isOutOfMemory } from "../edge_runtime/session.ts";
import { openStorage, SELF } from "../edge_runtime/storage.ts";
import { checkSigner } from "../edge_runtime/trust.ts";
import { BENCH_WORKER, type FromWorker, type Measure, type Measured, type Stop } from "./protocol.ts";

declare const self: DedicatedWorkerGlobalScope;

const stopping = new AbortController();
const tell = (message: FromWorker): void => self.postMessage(message);
let holding: string | undefined; // the task that is being worked on
let job = ""; // of that, or of the last one

self.onmessage = ({ data }: MessageEvent<Stop>) => stopping.abort(data.reason);

/** Measure one boundary in a runtime that has done nothing else. */
async function measure({ job, bundle: digest, version, ...what }: Measure): Promise<Measured> {
  try {
    watchHeap();
    const storage = await openStorage();
    const record = (await storage.device.get(SELF))!;
    const client = new DeviceClient(self.location.origin, record.token, { patience: 60 });
    await checkSigner(digest, await client.signature(digest), record.signer);
    const bundle = await RemoteBundle.open(client, digest, storage.graphs);
    const { threads, name } = await loadForPage(record.threads, (await adapterName()) !== undefined);
    const idle = heapBytes();
    const offer = { id: "", job, bundle: digest, version, leaseUntil: 0, work: {} };
    const cost = await benchBoundary(bundle, offer, what, () => heapBytes() - idle);
    return { kind: "measured", cost, idle, threads, runtime: name };
  } catch (error) {
    const outOfMemory = error instanceof OutOfMemory || isOutOfMemory(error);
    return { kind: "unmeasured", why: messageOf(error), outOfMemory, gone: error instanceof Declined && error.answer === 404 };
  }
}

async function main(): Promise<void> {
  watchHeap();
  const storage = await openStorage();
  const [record, data] = [await storage.device.get(SELF), await storage.data.get(SELF)];
  if (record?.device === undefined || data === undefined) throw new Error("this device has not joined yet");
  await removeLeftovers();
  const note = (text: string): void => tell({ kind: "note", text });
  const { threads } = await loadForPage(record.threads, (await adapterName()) !== undefined, note);
  const idle = heapBytes();
  tell({ kind: "ready", threads });
  const trouble = (why: string): void => tell({ kind: "trouble", why });
  const client = new DeviceClient(self.location.origin, record.token, { signal: stopping.signal, trouble });
  const agent = new Agent(
    client,
    storage,
    { data, memory: record.memory, threads, inFile, heapBytes: () => heapBytes() - idle },
    { needs: record.needs, signer: record.signer },
    async ({ needs, signer }) => {
      const now = (await storage.device.get(SELF))!;
      await storage.device.put(SELF, { ...now, needs, ...(signer === undefined ? {} : { signer }) });
    },
    {
      waiting: (why) => tell({ kind: "waiting", why }),
      began(offer, task, manifest) {
        holding = offer.id;
        job = offer.job;
        const { boundary, firstLayer, endLayer } = coverage(manifest, task.boundary);
        const layers = manifest.layers.length;
        tell({ kind: "began", task: offer.id, job, model: manifest.name, boundary: boundary.name, layers, trained: endLayer - firstLayer, round: task.round });
      },
      progress: (what, done, total) => tell({ kind: "progress", what, done, total }),
      sent(report) {
        holding = undefined;
        tell({ kind: "sent", job, report });
      },
      note,
      failed(reason, message) {
        holding = undefined;
        tell({ kind: "failed", reason, message });
      },
    },
    stopping.signal,
  );
  try {
    await agent.run();
    tell({ kind: "ended", how: "fresh", message: "" });
  } catch (error) {
    if (error instanceof Declined && error.isFinal) return tell({ kind: "ended", how: "refused", message: error.message });
    if (!stopping.signal.aborted) throw error;
    if (holding !== undefined) {
      const last = new DeviceClient(self.location.origin, record.token, { patience: 0 });
      await last.fail(holding, "stopped", String(stopping.signal.reason)).catch(() => {}); // the lease ends by itself
    }
    tell({ kind: "ended", how: "stopped", message: String(stopping.signal.reason) });
  }
}

if (self.name === BENCH_WORKER) self.onmessage = ({ data }: MessageEvent<Measure>) => void measure(data).then((answer) => self.postMessage(answer));
else main().catch((error: unknown) => tell({ kind: "ended", how: "broken", message: messageOf(error) }));
