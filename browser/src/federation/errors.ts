/**
 * Everything the agent raises on purpose; `reason` is what a failed task is reported with.
 *
 *     EmbraceError
 *     ├── InputError         the coordinator or the person gave something that cannot be right
 *     │   ├── BundleError    ... the bundle contradicts itself
 *     │   └── DataError      ... the local data does not fit the model
 *     └── TaskFailed         the device could not finish its task
 */

export class EmbraceError extends Error {
  readonly reason: string = "failed";

  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}

export class InputError extends EmbraceError {}
export class BundleError extends InputError {}

export class DataError extends InputError {
  override readonly reason: string = "data";
}

export class EmptyData extends DataError {
  override readonly reason = "empty_data";
}

export class TaskFailed extends EmbraceError {}

export class NonFiniteLoss extends TaskFailed {
  override readonly reason = "non_finite_loss";
}

export class OutOfMemory extends TaskFailed {
  override readonly reason = "out_of_memory";
}

/** The first line of whatever was thrown: onnxruntime and browsers throw many types. */
export function messageOf(error: unknown): string {
  const text = error instanceof Error ? error.message || error.name : String(error);
  return text.split("\n", 1)[0]!.slice(0, 500);
}
