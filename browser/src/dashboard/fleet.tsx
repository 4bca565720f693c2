/** All devices, those in trouble first. */
import { useState } from "preact/hooks";

import type { Fleet as FleetDocument, FleetDevice } from "./api.ts";
import { ago, duration } from "./format.ts";
import { useLive, useNow } from "./live.ts";
import { Badge, Card, Empty, Heading, Memory, Outside, Parts, PartsTable, Pending, Table, Wrong, type Column } from "./parts.tsx";

const MATTERS = ["fleet", "AcceptUpdate", "TaskFailed", "DeviceBenched", "DeviceUnfit", "RejectUpdate", "RoundCommitted", "GrantLease"];

const CALM = 1500; // milliseconds: the whole fleet is asked for

export function Fleet() {
  const fleet = useLive<FleetDocument>("/v1/fleet", (event) => MATTERS.includes(event.kind), CALM);
  const [sought, setSought] = useState("");
  const [state, setState] = useState("");
  const now = useNow(true);
  const devices = fleet.value?.devices ?? [];
  const states = [...new Set(devices.map((device) => device.state))].sort();
  const words = sought.trim().toLowerCase();
  const shown = devices.filter((device) => (state === "" || device.state === state) && [device.name, device.id, device.profile.tier ?? "", device.boundary, device.reason].some((text) => text.toLowerCase().includes(words)));
  return (
    <>
      <div class="title">
        <Heading>Devices</Heading>
        <a class="button main" href="#/join">Add devices</a>
      </div>
      {fleet.wrong && fleet.value && <Wrong>{fleet.wrong}</Wrong>}
      {fleet.value === undefined ? <Pending of={fleet} /> : devices.length === 0 ? (
        <Card>
          <Empty title="No device yet">
            <p>A phone joins <a href="#/join">by a link or a QR code</a>. A computer or a board runs an agent:</p>
            <pre>embrace agent --server {location.origin} --token TOKEN --data data.npz</pre>
          </Empty>
        </Card>
      ) : (
        <Card wide>
          <div class="filters">
            <label><span class="visually-hidden">Search devices</span><input type="search" placeholder="Search" value={sought} onInput={(event) => setSought(event.currentTarget.value)} /></label>
            <label>
              <span class="visually-hidden">State</span>
              <select value={state} onChange={(event) => setState(event.currentTarget.value)}>
                <option value="">all states</option>
                {states.map((each) => <option key={each} value={each}>{each}</option>)}
              </select>
            </label>
            <span class="quiet" role="status">{shown.length} of {fleet.value.total}{shown.length > 0 && ", worst first"}</span>
          </div>
          {shown.length === 0 ? <Empty title="No device is like that" /> : <Table caption="Devices" rows={shown} id={(row) => row.id} columns={columns(now)} />}
          <details>
            <summary>Colours of “Seconds by part”</summary>
            <PartsTable seconds={{ download: 0, load: 0, forward: 0, activation_io: 0, training: 0, state: 0, evaluation: 0, other: 0 }} names />
          </details>
        </Card>
      )}
    </>
  );
}

function columns(now: number): readonly Column<FleetDevice>[] {
  return [
    { name: "Device", cell: (row) => <><a href={`#/devices/${row.id}`}><Outside text={row.name} most={48} /></a><small class="below" title="last heard of">{ago(row.seen_at, now)}</small></>, key: (row) => row.name },
    { name: "State", cell: (row) => (row.unfit && row.state === "waiting" ? <Badge state="failed" text="unfit" /> : <Badge state={row.state} />), key: (row) => row.state },
    { name: "Tier", cell: (row) => (row.profile.tier ? <Outside text={row.profile.tier} most={24} /> : <span class="quiet">by memory</span>), key: (row) => row.profile.tier ?? "" },
    { name: "Trains from", cell: (row) => (row.boundary ? <Outside text={row.boundary} most={28} /> : <span class="quiet">–</span>), key: (row) => row.boundary },
    { name: "Memory", cell: (row) => <Memory used={row.memory.process ?? row.memory.anonymous} allowed={row.memory.allowed ?? row.profile.memory} />, key: (row) => (row.memory.process ?? row.memory.anonymous ?? 0) / (row.memory.allowed ?? row.profile.memory ?? Infinity), falling: true },
    { name: "Seconds by part", cell: (row) => (row.seconds.wall === undefined ? <span class="quiet">–</span> : <span class="meter"><span>{duration(row.seconds.wall)}</span><Parts seconds={row.seconds} /></span>), key: (row) => row.seconds.wall ?? 0, falling: true },
    { name: "Failures", cell: (row) => (row.failed === 0 ? <span class="quiet">0 of {row.done}</span> : `${row.failed} of ${row.done + row.failed}`), key: (row) => row.failed, numeric: true, falling: true },
    { name: "Last error", cell: (row) => (row.unfit || row.reason ? <span class="error"><Outside text={row.reason ? `${row.reason}${row.message ? `: ${row.message}` : ""}` : row.unfit} most={90} /></span> : <span class="quiet">none</span>), key: (row) => row.reason },
  ];
}
