/** The vocabulary of local rules, as far as a device needs it: federation/axes/local/rule.py. */
import type { DeviceTask, Handover, LocalModel, LocalResult, Vectors } from "../device_task.ts";
import type { Vector } from "../space.ts";

/** What a rule may need when a task begins; every vector covers the trained suffix. */
export interface Start {
  readonly x: Vector; // the parameters as received, moved in place by the steps
  readonly steps: number;
  readonly rate: number;
  readonly origin: Vector; // the parameters as received; they stay as they are while x moves
  readonly brought: Vectors;
  readonly stepsBefore: number; // that the device has taken with what it brings
}

/** A rule at work on one task; it holds its buffers. */
export class Running {
  /** Count a step; its blocks follow. */
  beginStep(): void {}

  /** Change the direction `g` of the elements [start, stop) in place. */
  direct(_start: number, _stop: number, _g: Vector, _x: Vector): void {}

  /** Return buffers to keep or to send. */
  state(): Vectors {
    return {};
  }

  /** Return the movement of x that is the server's and not the device's. */
  unreported(_rates: number): Vector | undefined {
    return undefined;
  }
}

/** The constants of a rule. */
export abstract class LocalRule {
  /** How many vectors, as long as the parameters, the rule holds while it works. */
  get buffers(): number {
    return 0;
  }

  /** Set the rule to work; may move `start.x` in place. */
  abstract begin(start: Start): Running;

  /** Collect the vectors that the rule starts from. */
  async beginTask(_task: DeviceTask, _model: LocalModel): Promise<Vectors> {
    return {};
  }

  /** Hand over the rule's tracks, and the vectors that the device keeps. */
  finishTask(_task: DeviceTask, _result: LocalResult): Handover {
    return {};
  }
}

/** Compute a − b in float32. */
export function minus(a: Vector, b: Vector): Vector {
  return a.map((value, at) => value - b[at]!);
}
