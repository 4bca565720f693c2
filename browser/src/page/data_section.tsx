/** The data that this device learns from: what it is, whether it fits the model, and how to pick other. */
import { useEffect, useState } from "preact/hooks";

import { Samples } from "../edge_runtime/data/samples.ts";
import { messageOf } from "../federation/errors.ts";
import type { Manifest } from "../federation/manifest.ts";
import { DataPicker } from "./data_picker.tsx";
import type { BrowserDevice } from "./device.ts";
import { describeData } from "./format.ts";

interface Props {
  readonly title: string;
  readonly device: BrowserDevice;
  readonly manifest: Manifest;
}

export function DataSection({ title, device, manifest }: Props) {
  const { data } = device;
  const [problem, setProblem] = useState("");
  useEffect(() => {
    try {
      if (data) new Samples(data, manifest);
      setProblem("");
    } catch (error) {
      setProblem(messageOf(error));
    }
  }, [data, manifest]);
  return (
    <section>
      <h2>{title}</h2>
      {data && <p class={problem ? "" : "good"} role="status">{describeData(data)}</p>}
      {problem && <p class="wrong" role="alert">{problem}</p>}
      <DataPicker manifest={manifest} picked={(found) => device.setData(found)} />
      <p class="quiet">It stays in this browser.</p>
    </section>
  );
}
