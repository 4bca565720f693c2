/** Where the time went: every second of a task belongs to exactly one part; what no part claims is `other`. */

const PARTS = ["download", "load", "activation_io", "training", "optimiser", "upload", "state", "evaluation"] as const;
export type PartName = (typeof PARTS)[number] | `forward/${string}`;

export class Stopwatch {
  hiddenDownload = 0; // fetched while something else was computed; not part of the sum
  private readonly seconds = new Map<string, number>();
  private readonly open: string[] = [];
  private readonly began: number;
  private last: number;

  constructor(readonly now: () => number = () => performance.now() / 1000) {
    this.began = this.last = now();
  }

  /** Count the seconds of some work for `name`, but for those of parts inside it. */
  async part<T>(name: PartName, work: () => T | Promise<T>): Promise<T> {
    this.charge();
    this.open.push(name);
    try {
      return await work();
    } finally {
      this.charge();
      this.open.pop();
    }
  }

  /** Return the account so far, as a report has it. */
  timings(): Record<string, unknown> {
    this.charge();
    const get = (name: string): number => this.seconds.get(name) ?? 0;
    const forward = [...this.seconds].filter(([name]) => name.startsWith("forward/"));
    return {
      wall: this.last - this.began,
      hidden_download: this.hiddenDownload,
      ...Object.fromEntries(PARTS.map((name) => [name, get(name)])),
      forward: Object.fromEntries(forward.map(([name, spent]) => [name.slice("forward/".length), spent])),
      training_forward: null,
      backward: null,
      other: get("other"),
    };
  }

  private charge(): void {
    const now = this.now();
    const name = this.open.at(-1) ?? "other";
    this.seconds.set(name, (this.seconds.get(name) ?? 0) + now - this.last);
    this.last = now;
  }
}
