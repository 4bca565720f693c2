/** What travels between the coordinator and a device: federation/messages.py. */
import { Field } from "./decode.ts";
import { InputError } from "./errors.ts";
import { exchangeOf, Exchange } from "./exchange.ts";
import type { Score } from "./metrics.ts";
import { rulesOf } from "./rules/index.ts";
import type { LocalRule } from "./rules/rule.ts";

const MOST = 10_000_000;
const LARGEST = 3.4028234663852886e38; // a float32

/** One device's work in one round. */
export interface Task {
  readonly boundary: string;
  readonly steps: number;
  readonly batch: number;
  readonly rate: number;
  readonly rules: readonly LocalRule[];
  readonly seed: number;
  readonly round: number;
  readonly refreshEvery: number;
  readonly activations: "float32" | "float16";
  readonly crop: number;
  readonly flip: boolean;
  readonly epochs: number | undefined;
  readonly exchange: Exchange;
  readonly holdout: number; // share of the local data that is never trained on
  readonly evaluate: boolean; // score the received version on that share, before training
  readonly clipNorm: number | undefined; // longer gradients are shortened to this
  readonly microBatch: number | undefined; // samples that go through the graph at once; undefined: the whole batch
  readonly goodSince: number; // the first round whose activations are used, whatever `refreshEvery` says
}

const FIELDS =
  "boundary steps batch rate rules seed round refresh_every activations crop flip epochs exchange holdout evaluate clip_norm micro_batch good_since".split(" ");

/** Read the work of an offer; an error names what is wrong. */
export function decodeTask(data: unknown): Task {
  const get = new Field(data, "task").table(FIELDS);
  return {
    boundary: get("boundary").text(),
    steps: get("steps").integer(1, MOST),
    batch: get("batch").integer(1, 65_536),
    rate: get("rate").number(0, LARGEST),
    rules: get("rules").or([], rulesOf),
    seed: get("seed").or(0, (f) => f.integer(Number.MIN_SAFE_INTEGER)),
    round: get("round").or(0, (f) => f.integer(0, MOST)),
    refreshEvery: get("refresh_every").or(1, (f) => f.integer(1, MOST)),
    activations: get("activations").or("float32", (f) => f.oneOf(["float32", "float16"])),
    crop: get("crop").or(0, (f) => f.integer(0, 65_536)),
    flip: get("flip").or(false, (f) => f.flag()),
    epochs: get("epochs").optional((f) => f.integer(1, MOST)),
    holdout: get("holdout").or(0, (f) => f.number(0, 1)),
    evaluate: get("evaluate").or(false, (f) => f.flag()),
    clipNorm: get("clip_norm").optional((f) => f.number(Number.MIN_VALUE, 1e30)),
    microBatch: get("micro_batch").optional((f) => f.integer(1, 65_536)),
    goodSince: get("good_since").or(0, (f) => f.integer(0, MOST)),
    exchange: get("exchange").or(undefined, exchangeOf) ?? exchangeOf(new Field({ sync: {} }, "task.exchange")),
  };
}

/** The number of samples of a task that go through the graph at once. */
export function atOnce(task: Task): number {
  return Math.min(task.batch, task.microBatch ?? task.batch);
}

/** How many vectors, as long as the parameters, a step of a task has beside them and its gradients. */
export function buffersOf(task: Task): number {
  const working = task.rules.reduce((sum, rule) => sum + rule.buffers, 0);
  return Math.max(1, working) + (atOnce(task) < task.batch ? 1 : 0);
}

/** The number of steps of a task on so many samples: passes over them become steps, of full batches only. */
export function stepsFor(task: Task, samples: number): number {
  return task.epochs === undefined ? task.steps : task.epochs * Math.max(1, Math.floor(samples / task.batch));
}

/** A device's work: fetch `version`, train as `work` says, send the update before the lease ends. */
export interface TaskOffer {
  readonly id: string;
  readonly job: string;
  readonly bundle: string;
  readonly version: number;
  readonly leaseUntil: number; // seconds since 1970
  readonly work: unknown;
}

/** Read an offer; its names become parts of addresses. */
export function decodeOffer(data: unknown): TaskOffer {
  const found = data as Record<string, unknown>;
  const [id, job, bundle] = [found.id, found.job, found.bundle].map((name) => {
    if (typeof name !== "string" || !/^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}$/.test(name)) {
      throw new InputError(`a task's name is ${String(name).slice(0, 80)}; expected letters, digits, '_', '-' and '.'`);
    }
    return name;
  }) as [string, string, string];
  const version = new Field(found.version, "task.version").integer();
  const leaseUntil = new Field(found.lease_until, "task.lease_until").number();
  return { id, job, bundle, version, leaseUntil, work: found.work };
}

/** What a device says about a task, as JSON has it. Of the data it says only how much there is. */
export interface Report {
  status: string;
  boundary: string;
  engine: string;
  profile: string;
  round: number;
  steps: number;
  batch: number;
  samples: number;
  loss: number | null;
  last_loss: number | null;
  seconds: Record<string, unknown>;
  memory: Record<string, number>;
  bytes: Record<string, number>;
  message: string;
  lost_state: boolean;
  evaluation: Partial<Score>; // of the received version on the held-out share
}
