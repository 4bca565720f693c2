/** Read values from parsed JSON with the path of what is wrong, as federation/decode.py does. */
import { InputError } from "./errors.ts";

/** A value and where it stands. */
export class Field {
  constructor(
    private readonly value: unknown,
    private readonly path: string,
  ) {}

  get missing(): boolean {
    return this.value === undefined || this.value === null;
  }

  /** Read an object; a key that is not listed is refused: it may mean something that this agent would not do. */
  table(known: readonly string[]): (key: string) => Field {
    const { value } = this;
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw this.wrong("an object");
    const extra = Object.keys(value).find((key) => !known.includes(key));
    if (extra !== undefined) throw new InputError(`${this.path}.${extra}: this agent does not know it; reload the page`);
    return (key) => new Field(Object.hasOwn(value, key) ? (value as Record<string, unknown>)[key] : undefined, `${this.path}.${key}`);
  }

  entries(): [string, Field][] {
    const { value } = this;
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw this.wrong("an object");
    return Object.entries(value).map(([key, item]) => [key, new Field(item, `${this.path}.${key}`)]);
  }

  list<T>(read: (item: Field) => T): T[] {
    if (!Array.isArray(this.value)) throw this.wrong("a list");
    return this.value.map((item, place) => read(new Field(item, `${this.path}[${place}]`)));
  }

  text(): string {
    if (typeof this.value !== "string") throw this.wrong("text");
    return this.value;
  }

  oneOf<const T extends string>(words: readonly T[]): T {
    if (!words.includes(this.value as T)) throw this.wrong(words.join(" or "));
    return this.value as T;
  }

  flag(): boolean {
    if (typeof this.value !== "boolean") throw this.wrong("true or false");
    return this.value;
  }

  number(least = -Infinity, most = Infinity): number {
    const { value } = this;
    if (typeof value !== "number" || !Number.isFinite(value) || value < least || value > most) {
      throw this.wrong(`a number from ${least} to ${most}`);
    }
    return value;
  }

  integer(least = 0, most = Number.MAX_SAFE_INTEGER): number {
    const value = this.number(least, most);
    if (!Number.isSafeInteger(value)) throw this.wrong("a whole number");
    return value;
  }

  /** Read what may be absent or null. */
  optional<T>(read: (field: this) => T): T | undefined {
    return this.missing ? undefined : read(this);
  }

  /** Read what may be absent and then has a default. */
  or<T>(fallback: T, read: (field: this) => T): T {
    return this.value === undefined ? fallback : read(this);
  }

  private wrong(expected: string): InputError {
    return new InputError(`${this.path}: expected ${expected}, got ${String(JSON.stringify(this.value)).slice(0, 80)}`);
  }
}
