/**
 * The part of a model that is trained or exchanged: whole layers, a slice of every layer's channels, a width box.
 *
 * A parameter is a matrix whose rows are its first dimension; a piece of it is some consecutive rows, and of each row a
 * prefix. So in the flat vector a piece is a run, or runs at equal distances.
 */
import { InputError } from "./errors.ts";
import { ParameterSpace, product, type Kind, type Parameter, type Slice, type Vector } from "./space.ts";

/** Elements of a flat vector: `rows` times `length` of them, `stride` apart. */
export interface Span {
  readonly start: number;
  readonly rows: number;
  readonly length: number;
  readonly stride: number;
}

/** Rows [first, end) of a parameter that begins at element `start`, and of each row the first `columns` elements. */
export interface Piece {
  readonly parameter: Parameter;
  readonly start: number;
  readonly first: number;
  readonly end: number;
  readonly columns: number;
}

const sizeOf = (piece: Piece): number => (piece.end - piece.first) * piece.columns;
const columnsOf = (shape: readonly number[]): number => product(shape.slice(1));

/** Pieces of parameters by layer, in the order of the space; a layer of which nothing belongs to it is empty. */
export class Region {
  readonly size: number;
  readonly runs: readonly Span[];

  constructor(readonly layers: readonly (readonly Piece[])[]) {
    const pieces = layers.flat();
    this.size = pieces.reduce((size, piece) => size + sizeOf(piece), 0);
    this.runs = merged(pieces.map(runOf));
  }

  /** What it is on the wire and in a graph: the pieces as tensors, one behind the other. */
  get space(): ParameterSpace {
    return new ParameterSpace(this.layers.map((layer) => layer.map(tensorOf)));
  }

  /** The one slice that it is, if it is one. */
  get plain(): Slice | undefined {
    const run = this.runs[0];
    if (run === undefined) return { start: 0, stop: 0 };
    return this.runs.length === 1 && run.rows === 1
      ? { start: run.start, stop: run.start + run.length }
      : undefined;
  }

  and(other: Region): Region {
    if (this.layers.length !== other.layers.length) throw new InputError("regions of different models");
    return new Region(this.layers.map((mine, index) => common(mine, other.layers[index]!)));
  }

  /** Take its elements from a vector; a plain slice is a view, not a copy. */
  gather(vector: Vector): Vector {
    const where = this.plain;
    if (where !== undefined) return vector.subarray(where.start, where.stop);
    const found = new Float32Array(this.size);
    let done = 0;
    for (const [start, stop] of this.rows()) {
      found.set(vector.subarray(start, stop), done);
      done += stop - start;
    }
    return found;
  }

  /** Put its elements into their places; the rest of the vector stays. */
  scatter(values: Vector, vector: Vector): void {
    if (values.length !== this.size) throw new InputError(`expected ${this.size} values, got ${values.length}`);
    let done = 0;
    for (const [start, stop] of this.rows()) {
      vector.set(values.subarray(done, done + stop - start), start);
      done += stop - start;
    }
  }

  /** Place the same elements as in the vector that `outer` gathers; it must hold all of them. */
  inside(outer: Region): Region {
    let start = 0;
    return new Region(
      this.layers.map((mine, index) => {
        const places = new Map<string, readonly [number, Piece]>();
        for (const piece of outer.layers[index]!) {
          places.set(piece.parameter.name, [start, piece]);
          start += sizeOf(piece);
        }
        return mine.map((piece) => placed(piece, places.get(piece.parameter.name)));
      }),
    );
  }

  /** Keep its weights only, or its statistics. */
  only(kind: Kind): Region {
    return new Region(this.layers.map((layer) => layer.filter((piece) => piece.parameter.kind === kind)));
  }

  private *rows(): Iterable<readonly [number, number]> {
    for (const run of this.runs) {
      for (let row = 0; row < run.rows; row++) {
        const start = run.start + row * run.stride;
        yield [start, start + run.length];
      }
    }
  }
}

/** Take every parameter of every layer. */
export function whole(space: ParameterSpace): Region {
  return ofLayers(space, () => true);
}

/** Take some layers, entirely. */
export function ofLayers(space: ParameterSpace, chosen: (layer: number) => boolean): Region {
  return new Region(space.layers.map((layer, index) => (chosen(index) ? layer.map((p) => entire(space, p)) : [])));
}

/** Take some parameters, entirely. */
export function ofParameters(space: ParameterSpace, names: ReadonlySet<string>): Region {
  return new Region(space.layers.map((layer) => layer.filter(({ name }) => names.has(name)).map((p) => entire(space, p))));
}

/** Take the `part`-th of `parts` slices of every parameter's rows; together they have each element once. */
export function channelPart(space: ParameterSpace, part: number, parts: number): Region {
  const cut = (piece: Piece): Piece => ({
    ...piece,
    first: Math.floor((piece.end * part) / parts),
    end: Math.floor((piece.end * (part + 1)) / parts),
  });
  return new Region(whole(space).layers.map((layer) => layer.map(cut).filter((piece) => sizeOf(piece) > 0)));
}

/** Take the first channels of every parameter: a model of the same layers with these shapes. */
export function box(space: ParameterSpace, shapes: readonly (readonly (readonly number[])[])[]): Region {
  return new Region(
    whole(space).layers.map((layer, index) =>
      layer.map((piece, place) => {
        const shape = shapes[index]![place]!;
        return { ...piece, end: shape.length > 0 ? shape[0]! : 1, columns: columnsOf(shape) };
      }),
    ),
  );
}

function entire(space: ParameterSpace, parameter: Parameter): Piece {
  const { shape } = parameter;
  const end = shape.length > 0 ? shape[0]! : 1;
  return { parameter, start: space.sliceOf(parameter.name).start, first: 0, end, columns: columnsOf(shape) };
}

function runOf(piece: Piece): Span {
  const width = columnsOf(piece.parameter.shape);
  const start = piece.start + piece.first * width;
  const rows = piece.end - piece.first;
  if (piece.columns === width || rows === 1) {
    return { start, rows: 1, length: rows * piece.columns, stride: rows * piece.columns };
  }
  return { start, rows, length: piece.columns, stride: width };
}

/** As a tensor of its own, for the wire. */
function tensorOf(piece: Piece): Parameter {
  const { shape } = piece.parameter;
  if (shape.length === 0) return piece.parameter;
  const rows = piece.end - piece.first;
  if (piece.columns === columnsOf(shape)) return { ...piece.parameter, shape: [rows, ...shape.slice(1)] };
  const rest = shape.slice(2);
  return { ...piece.parameter, shape: [rows, piece.columns / product(rest), ...rest] };
}

function intersect(piece: Piece, other: Piece): Piece {
  const first = Math.max(piece.first, other.first);
  const end = Math.max(first, Math.min(piece.end, other.end));
  return { ...piece, first, end, columns: Math.min(piece.columns, other.columns) };
}

function common(mine: readonly Piece[], theirs: readonly Piece[]): Piece[] {
  const others = new Map(theirs.map((piece) => [piece.parameter.name, piece]));
  return mine
    .filter((piece) => others.has(piece.parameter.name))
    .map((piece) => intersect(piece, others.get(piece.parameter.name)!))
    .filter((piece) => sizeOf(piece) > 0);
}

function placed(piece: Piece, place: readonly [number, Piece] | undefined): Piece {
  if (place === undefined || sizeOf(intersect(place[1], piece)) !== sizeOf(piece)) {
    throw new InputError(`'${piece.parameter.name}': a piece of it does not lie in the other region`);
  }
  const [start, outer] = place;
  const parameter = tensorOf(outer);
  return { parameter, start, first: piece.first - outer.first, end: piece.end - outer.first, columns: piece.columns };
}

function merged(runs: readonly Span[]): Span[] {
  const found: Span[] = [];
  for (const run of runs) {
    if (run.rows * run.length === 0) continue;
    const last = found.at(-1);
    if (last && last.rows === 1 && run.rows === 1 && last.start + last.length === run.start) {
      const length = last.length + run.length;
      found[found.length - 1] = { start: last.start, rows: 1, length, stride: length };
    } else {
      found.push(run);
    }
  }
  return found;
}
