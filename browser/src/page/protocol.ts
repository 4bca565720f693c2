/** What the page and its worker say to each other. */
import type { Report } from "../federation/messages.ts";

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
