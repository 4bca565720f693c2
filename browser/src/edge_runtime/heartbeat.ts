/** Tell the coordinator that a device is at work, and hear whether the work is still wanted. */
import { EmbraceError, messageOf } from "../federation/errors.ts";
import { Declined, type DeviceClient } from "./client.ts";

const SHARE = 3; // of a lease: so many heartbeats may be sent before it runs out
const [LEAST, MOST] = [0.05, 60]; // seconds between two of them

/** The task is no longer this device's: its round closed, or another device has it. */
export class TaskLost extends EmbraceError {}

export class Heartbeat {
  private timer: ReturnType<typeof setTimeout> | undefined;
  private lost = ""; // why

  /** Beat until `stop`. `lease` is in seconds; undefined: an earlier coordinator, which knows no heartbeats. */
  constructor(
    private readonly client: DeviceClient,
    private readonly task: string,
    private lease: number | undefined,
  ) {
    this.wait();
  }

  stop(): void {
    clearTimeout(this.timer);
    this.lease = undefined;
  }

  /** Throw TaskLost if the work is of no use any more. */
  check(): void {
    if (this.lost) throw new TaskLost(this.lost);
  }

  private wait(): void {
    if (this.lease === undefined) return;
    this.timer = setTimeout(() => void this.beat(), 1000 * Math.min(Math.max(this.lease / SHARE, LEAST), MOST));
  }

  private async beat(): Promise<void> {
    try {
      const seconds = await this.client.heartbeat(this.task);
      if (this.lease !== undefined) this.lease = seconds;
    } catch (error) {
      if (error instanceof Declined) this.lost = messageOf(error);
      if (this.lost) return; // else the next one may arrive
    }
    this.wait();
  }
}
