/** What the page shows stays true by itself: the coordinator tells what happened, and what that concerns is asked for again. */
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { ask, clock, Refusal } from "./api.ts";

const PAUSE = 400; // milliseconds in which several events lead to one question
const AGAIN = 20; // places of a list that grows that are asked for again: scores come late
const HIDDEN = 30_000; // milliseconds after which a page that is not visible gives its stream back: browsers have six for a host
const RETRY = 3000; // milliseconds until a question that was not answered is asked again

/** An event of a job; or of the fleet, if `job` is empty. */
export interface Happened {
  readonly id: number;
  readonly job: string;
  readonly at: number;
  readonly kind: string;
  readonly body: Readonly<Record<string, unknown>>;
}

export type Link = "connecting" | "live" | "lost";
export type Counts = Readonly<Record<string, number>>; // devices by state
type Listener = (event: Happened | undefined) => void; // undefined: anything may have happened meanwhile

/** The one stream of the page. */
export class Live {
  link: Link = "connecting";
  fleet: Counts = {};
  readonly recent: Happened[] = []; // newest first
  private source: EventSource | undefined;
  private readonly listeners = new Set<Listener>();

  constructor() {
    let timer: ReturnType<typeof setTimeout> | undefined;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(timer);
      if (this.source === undefined) return;
      if (document.hidden) timer = setTimeout(() => this.source?.close(), HIDDEN);
      else if (this.source.readyState === EventSource.CLOSED) this.open();
    });
  }

  open(): void {
    this.close();
    const source = (this.source = new EventSource("/v1/events"));
    source.onopen = () => this.tell((this.link = "live"), undefined);
    source.onmessage = (message) => this.happened(JSON.parse(message.data as string) as Happened);
    for (const kind of ["fleet", "benchmarks"]) {
      source.addEventListener(kind, (message) => {
        const body = JSON.parse((message as MessageEvent).data as string) as Counts;
        if (kind === "fleet") this.fleet = body;
        this.happened({ id: 0, job: "", at: clock(), kind, body });
      });
    }
    source.onerror = () => {
      this.tell((this.link = "lost"), { id: 0, job: "", at: 0, kind: "lost", body: {} });
      if (source.readyState !== EventSource.CLOSED) return; // it tries again by itself
      setTimeout(() => {
        if (this.source !== source) return;
        void ask("/v1/session").then(() => this.open(), () => this.source === source && this.open());
      }, RETRY);
    };
  }

  close(): void {
    this.source?.close();
    this.source = undefined;
  }

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  private happened(event: Happened): void {
    if (event.job !== "") this.recent.splice(0, this.recent.length, event, ...this.recent.slice(0, 199));
    this.tell(this.link, event);
  }

  private tell(_: Link, event: Happened | undefined): void {
    for (const listener of this.listeners) listener(event);
  }
}

export const live = new Live();

export interface Loaded<T> {
  readonly value: T | undefined;
  readonly wrong: string;
  readonly missing: boolean; // the coordinator says that there is no such thing
  readonly again: () => void;
}

const EVERYTHING = (): boolean => true;

/** Ask for something, and again whenever an event concerns it. */
export function useLive<T>(path: string, concerns: (event: Happened) => boolean = EVERYTHING, pause = PAUSE): Loaded<T> {
  return useAsked<T>(path, () => ask<T>(path), concerns, pause);
}

/** Ask for a list that grows with every round: all of it once, then its end. `query` says from which place on. */
export function useGrowing<T>(path: string, query: string, place: (row: T) => number, concerns: (event: Happened) => boolean): Loaded<readonly T[]> {
  const grown = async (known: readonly T[] = []): Promise<readonly T[]> => {
    const first = Math.max(0, known.reduce((most, row) => Math.max(most, place(row)), 0) - AGAIN);
    return [...known.filter((row) => place(row) < first), ...(await ask<readonly T[]>(`${path}?${query}=${first}`))];
  };
  return useAsked(path, grown, concerns, PAUSE);
}

/** Ask a question, and again whenever an event concerns it. What was known stays while the question is open. */
function useAsked<T>(path: string, question: (known: T | undefined) => Promise<T>, concerns: (event: Happened) => boolean, pause: number): Loaded<T> {
  const [known, setKnown] = useState<{ path: string; value: T }>();
  const [wrong, setWrong] = useState<{ path: string; message: string; status: number }>();
  const matters = useRef(concerns);
  matters.current = concerns;
  const [turn, setTurn] = useState(0);
  const again = useCallback(() => setTurn((count) => count + 1), []);
  useEffect(() => {
    let [over, busy, stale] = [false, false, false];
    let last: T | undefined;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const look = async (): Promise<void> => {
      timer = undefined;
      if (busy) {
        stale = true;
        return;
      }
      [busy, stale] = [true, false];
      try {
        const value = (last = await question(last));
        if (!over) {
          setKnown({ path, value });
          setWrong(undefined);
        }
      } catch (error) {
        const status = error instanceof Refusal ? error.status : 0;
        if (!over) setWrong({ path, message: error instanceof Error ? error.message : String(error), status });
        if (!over && (status === 0 || status >= 500)) timer = setTimeout(() => void look(), RETRY);
      }
      busy = false;
      if (stale && !over) soon();
    };
    const soon = (): void => {
      timer ??= setTimeout(() => void look(), pause);
    };
    const leave = live.listen((event) => (event === undefined || matters.current(event)) && soon());
    void look();
    return () => {
      over = true;
      clearTimeout(timer);
      leave();
    };
  }, [path, turn]);
  const current = wrong?.path === path ? wrong : undefined;
  return { value: known?.path === path ? known.value : undefined, wrong: current?.message ?? "", missing: current?.status === 404, again };
}

/** Draw again with every event. */
export function useStream(): Live {
  const [, redraw] = useState(0);
  useEffect(() => {
    let frame = 0;
    const leave = live.listen(() => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        redraw((count) => count + 1);
      });
    });
    return () => {
      cancelAnimationFrame(frame);
      leave();
    };
  }, []);
  return live;
}

/** The time in seconds since 1970, which moves while something that takes time is shown. */
export function useNow(moves: boolean): number {
  const [now, setNow] = useState(clock);
  useEffect(() => {
    if (!moves) return;
    const timer = setInterval(() => setNow(clock()), 1000);
    return () => clearInterval(timer);
  }, [moves]);
  return now;
}
