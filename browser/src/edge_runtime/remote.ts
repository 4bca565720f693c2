/** A bundle that lies with the coordinator: graphs are fetched once and kept, weights layer by layer when they are due. */
import { coverage } from "../federation/coverage.ts";
import type { Part, ServerValues } from "../federation/device_task.ts";
import { BundleError } from "../federation/errors.ts";
import { trainedRegion, type Exchange } from "../federation/exchange.ts";
import { loads, type Boundary, type FileRef, type Layer, type Manifest } from "../federation/manifest.ts";
import type { TaskOffer } from "../federation/messages.ts";
import type { Region } from "../federation/region.ts";
import type { Bytes, Slice, Vector } from "../federation/space.ts";
import { checkFinite, decodeFirst, MODEL, weightsHeader } from "../federation/wire.ts";
import { sha256, type DeviceClient } from "./client.ts";
import type { FetchedLayer, LayerSource } from "./forward.ts";
import { checkForwardGraph, checkTrainingGraph } from "./graph_check.ts";
import { moveExternalData } from "./graph_file.ts";
import { joined } from "./protobuf.ts";
import type { Table } from "./storage.ts";

const MOST_GRAPH = 2 ** 28; // bytes
const MOST_HEADER = 2 ** 20 + 8;

/** Graphs by hash in a cache, and weights by range. */
export class RemoteBundle {
  readonly dataStart: number;
  private readonly harmless = new Set<string>(); // graphs whose structure was checked

  private constructor(
    readonly client: DeviceClient,
    readonly manifest: Manifest,
    private readonly cache: Table<Bytes>,
  ) {
    this.dataStart = weightsHeader(manifest.space).length;
  }

  static async open(client: DeviceClient, digest: string, cache: Table<Bytes>): Promise<RemoteBundle> {
    return new RemoteBundle(client, loads(await client.manifest(digest)), cache);
  }

  /** Read a graph from the cache or from the coordinator. */
  async graph(ref: FileRef): Promise<Bytes> {
    if (ref.bytes > MOST_GRAPH) throw new BundleError(`a graph has ${ref.bytes} bytes; expected at most ${MOST_GRAPH}`);
    const known = await this.cache.get(ref.sha256);
    if (known !== undefined && (await sha256(known)) === ref.sha256) return known;
    const found = await this.client.graph(ref.sha256, ref.bytes);
    await this.cache.put(ref.sha256, found);
    return found;
  }

  /** Read a training graph; one that does other things than training is refused. */
  async trainingGraph(boundary: Boundary): Promise<Bytes> {
    if (boundary.train === undefined) throw new BundleError(`boundary '${boundary.name}' has no graph for the portable engine`);
    const graph = await this.graph(boundary.train);
    this.once(boundary.train, () => checkTrainingGraph(graph, this.manifest, boundary));
    return graph;
  }

  /** Read the graph of a frozen layer, checked in the same way. */
  async layerGraph(layer: Layer): Promise<Bytes> {
    const graph = await this.graph(layer.forward);
    this.once(layer.forward, () => checkForwardGraph(graph, this.manifest, layer));
    return graph;
  }

  private once({ sha256: digest }: FileRef, check: () => void): void {
    if (this.harmless.has(digest)) return;
    check();
    this.harmless.add(digest);
  }

  /** Fetch a range of the weights of a task's version. */
  async weights(offer: TaskOffer, where: Slice): Promise<Bytes> {
    if (where.stop === where.start) return new Uint8Array(0);
    const [start, stop] = [this.dataStart + 4 * where.start, this.dataStart + 4 * where.stop];
    return this.client.weights(offer.job, offer.version, start, stop);
  }
}

/** What a device's part in a round asks for (participant.ts), over HTTP. */
export class RemoteServer implements ServerValues {
  constructor(
    private readonly bundle: RemoteBundle,
    private readonly offer: TaskOffer,
    private readonly exchange: Exchange,
  ) {}

  async model(part: Part): Promise<Vector> {
    const where = part.region.plain;
    if (where === undefined) return this.part(MODEL, part, 0);
    const vector = new Float32Array((await this.bundle.weights(this.offer, where)).buffer);
    checkFinite("weights", vector);
    return vector;
  }

  async before(part: Part): Promise<Vector> {
    return this.part(MODEL, part, -1);
  }

  async state(name: string, part: Part): Promise<Vector> {
    return this.part(name, part, 0);
  }

  async inherited(): Promise<readonly [Region, Vector]> {
    const { manifest, client } = this.bundle;
    const region = trainedRegion(manifest, coverage(manifest, this.exchange.inherit!.boundary));
    const tracks = [MODEL, ...this.exchange.tracks];
    const body = await client.inherited(this.offer.id, MOST_HEADER + 4 * tracks.length * region.size);
    return [region, decodeFirst(new Map(tracks.map((name) => [name, region])), body)];
  }

  private async part(name: string, part: Part, later: number): Promise<Vector> {
    const { job, version } = this.offer;
    const most = MOST_HEADER + 4 * part.region.size;
    const body = await this.bundle.client.part(job, version + later, name, part.boundary, part.unit, most);
    return decodeFirst(new Map([[name, part.region]]), body);
  }
}

/** Frozen layers of one version of the weights. */
export class RemoteSource implements LayerSource {
  readonly manifest: Manifest;
  readonly lineage: string;
  readonly version: string;

  constructor(
    private readonly bundle: RemoteBundle,
    private readonly offer: TaskOffer,
  ) {
    this.manifest = bundle.manifest;
    this.lineage = offer.job;
    this.version = `${offer.job}/${offer.version}`;
  }

  async fetch(layer: Layer): Promise<FetchedLayer> {
    const { space } = this.manifest;
    const parts = [space.around(layer.parameters), ...layer.borrowed.map((name) => space.sliceOf(name))];
    const found: Bytes[] = [];
    for (const part of parts) found.push(await this.bundle.weights(this.offer, part));
    const graph = await this.bundle.layerGraph(layer);
    const places = parts.map(({ start, stop }) => ({ start: this.bundle.dataStart + 4 * start, stop: this.bundle.dataStart + 4 * stop }));
    return { graph: moveExternalData(graph, places), weights: found.length === 1 ? found[0]! : joined(found) };
  }
}
