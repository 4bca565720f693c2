/** What the page and its worker say to each other. */
import type { BenchCase } from "../edge_runtime/bench.ts";
import type { BoundaryCost } from "../federation/benchmark.ts";
import type { Report } from "../federation/messages.ts";

export const BENCH_WORKER = "embrace bench"; // the name of a worker that measures one boundary, and ends

/** What such a worker is told. */
export interface Measure extends BenchCase {
  readonly kind: "measure";
  readonly job: string;
  readonly bundle: string;
  readonly version: number;
}

/** What it answers. */
export type Measured =
  | { readonly kind: "measured"; readonly cost: BoundaryCost; readonly idle: number; readonly threads: number; readonly runtime: string }
  | { readonly kind: "unmeasured"; readonly why: string; readonly outOfMemory: boolean; readonly gone: boolean }; // gone: so is the version

/** A worker starts by itself with what the storage has; this ends it. */
export interface Stop {
  readonly kind: "stop";
  readonly reason: string; // for the coordinator
}

export type FromWorker =
  | { readonly kind: "ready"; readonly threads: number }
  | { readonly kind: "waiting"; readonly why: string }
  | { readonly kind: "trouble"; readonly why: string }
  | {
      readonly kind: "began";
      readonly task: string;
      readonly job: string;
      readonly model: string;
      readonly boundary: string;
      readonly layers: number; // of which
      readonly trained: number;
      readonly round: number;
    }
  | { readonly kind: "progress"; readonly what: string; readonly done: number; readonly total: number }
  | { readonly kind: "sent"; readonly job: string; readonly report: Report }
  | { readonly kind: "note"; readonly text: string }
  | { readonly kind: "failed"; readonly reason: string; readonly message: string }
  | { readonly kind: "ended"; readonly how: "stopped" | "refused" | "fresh" | "broken"; readonly message: string };
