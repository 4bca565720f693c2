/** The agent: wait for a task, do it, answer, again. It rides out outages and never dies of a task. */
import { coverage } from "../federation/coverage.ts";
import { needOf, type MeasuredNeed } from "../federation/capacity.ts";
import { EmbraceError, messageOf, OutOfMemory, TaskFailed } from "../federation/errors.ts";
import type { Boundary, Manifest } from "../federation/manifest.ts";
import { atOnce, buffersOf, decodeTask, type Report, type Task, type TaskOffer } from "../federation/messages.ts";
import { product } from "../federation/space.ts";
import { encode } from "../federation/wire.ts";
import { inMemory, type MakeRoom } from "./activations.ts";
import { Declined, FIRST_PAUSE, LONGEST_PAUSE, pause, Unreachable, type DeviceClient, type Profile } from "./client.ts";
import { Samples, type Dataset } from "./data/samples.ts";
import type { ForwardPlan, Progress } from "./forward.ts";
import { scoreReceived } from "./evaluate.ts";
import { Heartbeat, TaskLost } from "./heartbeat.ts";
import { begin, finish } from "./participant.ts";
import { RemoteBundle, RemoteServer, RemoteSource } from "./remote.ts";
import { runtime } from "./runtime.ts";
import type { Storage } from "./storage.ts";
import { Stopwatch } from "./timing.ts";
import { Trainer } from "./trainer.ts";
import { checkSigner } from "./trust.ts";

const OVER = ["stopped", "done", "failed"]; // states of a job that does not go on
const LARGEST_FORWARD_BATCH = 64;
const MOST_NEEDS = 64;
const WAIT = 30; // seconds of a long poll
const BREATH = 40; // milliseconds of computing after which messages and timers get a turn

/** What the person who joins decides, and what this device has. */
export interface Device {
  readonly data: Dataset;
  readonly memory: number; // bytes for training, beside the idle runtime
  readonly threads: number;
  readonly inFile: MakeRoom; // for activations that do not fit memory
  readonly heapBytes: () => number; // of the runtime, beyond its idle size; it never shrinks
}

/** What this device has learned: what steps take here, and whose bundles it trains. */
export interface Known {
  readonly needs: readonly MeasuredNeed[];
  readonly signer: string | undefined;
}

/** What a person sees of it. */
export interface Watcher {
  waiting(why: string): void;
  began(offer: TaskOffer, task: Task, manifest: Manifest): void;
  progress(what: string, done: number, total: number): void;
  sent(report: Report): void;
  failed(reason: string, message: string): void;
  note(text: string): void;
}

/** More memory than the person allowed. */
class TooLarge extends TaskFailed {
  override readonly reason = "too_large";
}

interface Loaded {
  readonly key: string; // bundle, held-out share and its seed
  readonly bundle: RemoteBundle;
  readonly heldOut: Samples | undefined; // to score versions with
  readonly plan: Omit<ForwardPlan, "storedAs">;
  readonly trainer: Trainer;
}

export class Agent {
  private loaded: Loaded | undefined;
  private heartbeat: Heartbeat | undefined; // of the task at work
  private readonly begun = new Set<string>(); // jobs
  private breathed = performance.now();
  private measured = false; // by a first step in this runtime
  private spoilt = false; // the runtime's heap has grown beyond what the person allows, or it is broken

  constructor(
    private readonly client: DeviceClient,
    private readonly storage: Storage,
    private readonly device: Device,
    private known: Known,
    private readonly remember: (known: Known) => Promise<void>,
    private readonly watcher: Watcher,
    private readonly signal: AbortSignal,
  ) {}

  /** Work until told to stop. Returns whether a fresh runtime is needed to go on. */
  async run(): Promise<boolean> {
    await this.client.setProfile(this.profile);
    await this.resumeUploads();
    let [failed, refused, wait] = [0, 0, 0]; // the first answer comes at once
    while (!this.spoilt) {
      let offer: TaskOffer | undefined;
      try {
        offer = await this.client.nextTask(wait);
        [wait, refused] = [WAIT, 0];
      } catch (error) {
        if (!(error instanceof EmbraceError) || (error instanceof Declined && error.isFinal)) throw error;
        this.watcher.waiting(error.message);
        await this.rest(++refused);
        continue;
      }
      if (offer === undefined) {
        await this.stayAway(this.client.waiting, this.client.comeBack);
        continue;
      }
      failed = (await this.answer(offer)) ? 0 : failed + 1;
      if (!this.spoilt) await this.rest(failed - 1);
    }
    await this.loaded?.trainer.close().catch(() => {});
    return true;
  }

  private get profile(): Profile {
    const { memory, threads } = this.device;
    return { memory, threads, runtime: runtime().name, engines: ["portable"], needs: this.known.needs };
  }

  /** Show why there is no task, and wait for as long as the coordinator said that this device is not needed. */
  private async stayAway(why: string, seconds: number | undefined): Promise<void> {
    this.watcher.waiting(seconds === undefined ? why : `${why}; asks again in ${Math.round(seconds)} s`);
    if (seconds !== undefined) await pause(seconds, this.signal);
  }

  private async rest(times: number): Promise<void> {
    if (times > 0) await pause(Math.min(FIRST_PAUSE * 2 ** Math.min(times, 30), LONGEST_PAUSE) * (0.5 + Math.random()), this.signal);
  }

  /** Send what was trained before the page went away; one that the coordinator does not want any more is dropped. */
  private async resumeUploads(): Promise<void> {
    for (const [task, { job, body, report }] of await this.storage.uploads.entries()) {
      try {
        await this.client.sendUpdate(task, body, report);
        await this.acknowledged(job, task);
        this.watcher.sent(report);
      } catch (error) {
        if (!(error instanceof Declined) || error.isFinal) throw error;
      }
      await this.storage.uploads.delete(task);
    }
  }

  /** Do a task and send the result; whatever goes wrong with it is reported, and the agent lives on. */
  private async answer(offer: TaskOffer): Promise<boolean> {
    this.heartbeat = new Heartbeat(this.client, offer.id, this.client.lease);
    try {
      const report = await this.work(offer);
      this.watcher.sent(report);
      return true;
    } catch (error) {
      if (this.signal.aborted) throw error;
      if (error instanceof Declined && error.isFinal) throw error;
      if (error instanceof TaskLost || (error instanceof Declined && error.answer === 409)) {
        this.watcher.failed("late", error.message); // the round is over, or another device has the task
        return false;
      }
      const full = error instanceof DOMException && error.name === "QuotaExceededError";
      const reason = full ? "disk_full" : reasonOf(error);
      this.spoilt ||= reason === "out_of_memory" || reason === "too_large" || !(error instanceof EmbraceError);
      const message = full ? "the browser has no room left for this page" : messageOf(error);
      this.watcher.failed(reason, message);
      await this.client.fail(offer.id, reason, message).catch((other: unknown) => {
        if (other instanceof Declined && other.isFinal) throw other;
      });
      return false;
    } finally {
      this.heartbeat.stop();
    }
  }

  private async work(offer: TaskOffer): Promise<Report> {
    const watch = new Stopwatch();
    const task = decodeTask(offer.work);
    const before = this.client.received;
    const { bundle, trainer, heldOut, plan } = await watch.part("download", async () => {
      const loaded = await this.load(offer, task);
      this.watcher.began(offer, task, loaded.bundle.manifest);
      for (const boundary of coverage(loaded.bundle.manifest, task.boundary).graphs) await loaded.bundle.trainingGraph(boundary);
      await this.forgetFinished(offer.job);
      return loaded;
    });
    const source = (trainer.source = new RemoteSource(bundle, offer));
    const evaluation = task.evaluate && heldOut?.length ? await scoreReceived(source, heldOut, plan, watch, this.progress) : undefined;
    const begun = await watch.part("download", () => {
      const server = new RemoteServer(bundle, offer, task.exchange);
      return begin(task, bundle.manifest, server, (last) => this.storage.kept.get(last));
    });
    const { boundary } = begun.device.covered;
    this.measure = (): Promise<void> => this.checkMemory(boundary, atOnce(task), 4 * begun.device.graph.size);
    const outcome = await trainer.run(task, begun.received, watch);
    const contribution = await watch.part("optimiser", () => finish(begun, outcome));
    await watch.part("state", () => {
      const { kept: vectors, walked, steps } = contribution;
      const kept = { task: offer.id, job: offer.job, boundary: task.boundary, vectors, walked, steps };
      return Object.keys(vectors).length > 0 ? this.storage.kept.put(offer.id, kept) : undefined;
    });
    const body = encode(contribution.tracks);
    const report: Report = {
      ...outcome.report,
      lost_state: begun.device.lost,
      evaluation: evaluation && Number.isFinite(evaluation.loss) ? evaluation : {},
      seconds: watch.timings(),
      memory: { anonymous: this.needBytes(4 * begun.device.graph.size) },
      bytes: { ...outcome.report.bytes, downloaded: this.client.received - before, uploaded: body.length },
    };
    await watch.part("state", () => this.storage.uploads.put(offer.id, { job: offer.job, body, report }));
    try {
      await watch.part("upload", () => this.client.sendUpdate(offer.id, body, report));
      await this.acknowledged(offer.job, offer.id);
    } finally {
      if (!this.signal.aborted) await this.storage.uploads.delete(offer.id);
    }
    return { ...report, seconds: watch.timings() };
  }

  private measure: () => Promise<void> = async () => {};

  /** Watch the training: after the first step its memory is known. Messages and timers get a turn now and then. */
  private readonly progress: Progress = async (what, done, total) => {
    this.signal.throwIfAborted();
    this.heartbeat?.check();
    this.watcher.progress(what, done, total);
    if (what === "train" && done === 1) await this.measure();
    if (performance.now() - this.breathed > BREATH) {
      await new Promise((resolve) => setTimeout(resolve, 0));
      this.breathed = performance.now();
    }
  };

  /** What a step has taken: the runtime's heap beyond its idle size, and what was received, a rule's buffer and the update beside it. */
  private needBytes(vector: number): number {
    return this.device.heapBytes() + 3 * vector;
  }

  /** Remember what a first step took; give the task back if that is more than the person allows. */
  private async checkMemory(boundary: Boundary, batch: number, vector: number): Promise<void> {
    if (this.measured) return; // the heap has the size of what was trained before
    this.measured = true;
    const graph = boundary.train!.sha256;
    const bytes = this.needBytes(vector);
    const others = this.known.needs.filter((need) => need.graph !== graph || need.batch !== batch);
    await this.learn({ needs: [{ graph, batch, bytes }, ...others].slice(0, MOST_NEEDS) });
    await this.client.setProfile(this.profile);
    if (bytes > this.device.memory) {
      throw new TooLarge(`training from '${boundary.name}' takes ${megabytes(bytes)}, and ${megabytes(this.device.memory)} are allowed`);
    }
  }

  private async learn(some: Partial<Known>): Promise<void> {
    this.known = { ...this.known, ...some };
    await this.remember(this.known);
  }

  private async load(offer: TaskOffer, task: Task): Promise<Loaded> {
    const key = [offer.bundle, task.holdout, task.holdout ? task.seed : 0].join();
    if (this.loaded?.key !== key) {
      await this.loaded?.trainer.close(); // one bundle at a time: memory is short
      this.loaded = undefined;
      const signer = await checkSigner(offer.bundle, await this.client.signature(offer.bundle), this.known.signer);
      if (signer !== this.known.signer) await this.learn({ signer });
      const bundle = await RemoteBundle.open(this.client, offer.bundle, this.storage.graphs);
      const everything = new Samples(this.device.data, bundle.manifest);
      // By the device's own seed: the same samples in every round, also after a reload.
      const [samples, heldOut] = task.holdout ? everything.split(task.holdout, task.seed) : [everything, undefined];
      const plan = this.forwardPlan(bundle.manifest, task, samples.length);
      const graphOf = (boundary: Boundary) => bundle.trainingGraph(boundary);
      const trainer = new Trainer(new RemoteSource(bundle, offer), samples, graphOf, plan, this.progress, (text) => this.watcher.note(text));
      this.loaded = { key, bundle, trainer, heldOut, plan };
    }
    return this.loaded;
  }

  /** Plan how to run the frozen layers in what training leaves; activations that do not fit go to a file. */
  private forwardPlan(manifest: Manifest, task: Task, samples: number): Omit<ForwardPlan, "storedAs"> {
    const { boundary } = coverage(manifest, task.boundary);
    const room = this.device.memory;
    const need = needOf(manifest, boundary, atOnce(task), this.known.needs, buffersOf(task));
    if (need > 2 * room) throw new OutOfMemory(`training from '${boundary.name}' needs about ${megabytes(need)}, and ${megabytes(room)} are allowed`);
    const spare = Math.max(room - need, room / 8);
    const largest = Math.max(...manifest.layers.map((layer) => Math.max(layer.activations, product(layer.output.shape))));
    const batch = Math.max(1, Math.min(LARGEST_FORWARD_BATCH, Math.floor(spare / 4 / (8 * largest))));
    const stored = 2 * samples * largest * (task.activations === "float16" ? 2 : 4);
    return { batch, memory: spare / 2, makeRoom: stored <= spare / 4 ? inMemory : this.device.inFile };
  }

  /** Remove what was kept of all tasks of a job but the one that the coordinator has. */
  private async acknowledged(job: string, task: string): Promise<void> {
    for (const [key, kept] of await this.storage.kept.entries()) {
      if (kept.job === job && key !== task) await this.storage.kept.delete(key);
    }
  }

  /** When a job begins, remove what was kept of jobs that are over. */
  private async forgetFinished(job: string): Promise<void> {
    if (this.begun.has(job)) return;
    this.begun.add(job);
    for (const [key, kept] of await this.storage.kept.entries()) {
      if (kept.job === job) continue;
      const state = await this.client.jobState(kept.job).catch((error: unknown) => {
        if (error instanceof Declined) return "stopped"; // this coordinator does not have it any more
        throw error;
      });
      if (OVER.includes(state)) await this.storage.kept.delete(key);
    }
  }
}

/** The word that a failed task is reported with. */
function reasonOf(error: unknown): string {
  if (error instanceof Declined) return [400, 413, 422].includes(error.answer) ? "refused" : "coordinator";
  if (error instanceof Unreachable) return "coordinator";
  return error instanceof EmbraceError ? error.reason : "failed";
}

function megabytes(bytes: number): string {
  return `${Math.round(bytes / 1e6)} MB`;
}
