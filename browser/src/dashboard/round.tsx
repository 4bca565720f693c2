/** The round that is open: who trains what, who is late, and what the job waits for. */
import type { Job, Seat, Seats } from "./api.ts";
import { duration, median } from "./format.ts";
import { useNow } from "./live.ts";
import { Badge, Bar, Card, Outside, Table, type Column } from "./parts.tsx";

const LATE = 2; // times what a task usually takes ...
const AT_LEAST = 5; // ... and seconds
const TITLES: Readonly<Record<string, string>> = { selecting: "needs devices", collecting: "is open", closing: "is being closed", committed: "is done", abandoned: "was given up" };

export function LiveRound({ job, seats }: { readonly job: Job; readonly seats: Seats | undefined }) {
  const round = job.round;
  const now = useNow(true);
  const mine = (seats?.seats ?? []).filter((seat) => seat.round === round?.number);
  const arrived = mine.filter((seat) => seat.state === "arrived");
  const usual = median(arrived.flatMap((seat) => seat.seconds ?? []));
  const wanted = round?.body.wanted || mine.length;
  const trouble = [...Object.entries(job.unfit).map(([device, why]) => ({ device, why, state: "failed", text: "cannot take part" })), ...Object.entries(job.benched).map(([device, why]) => ({ device, why, state: "benched", text: "benched" }))];
  const late = mine.filter((seat) => isLate(seat, now, usual)).length;
  return (
    <Card title={round ? `Round ${round.number} ${TITLES[round.state] ?? round.state}` : "No round"} side={round?.state === "collecting" && <span>{arrived.length} of {wanted} updates{late > 0 && <> · <Badge state="late" text={`${late} late`} /></>}</span>} wide>
      {round?.state === "collecting" && <Bar share={arrived.length / Math.max(1, wanted)} label={`${arrived.length} of ${wanted} updates`} />}
      {job.waiting && <p class="waits"><Outside text={job.waiting.text} most={400} /></p>}
      {mine.length > 0 && <Table caption={`Devices of round ${round?.number}`} rows={mine} id={(seat) => String(seat.slot)} columns={columns(seats!, now, usual)} most={50} />}
      {trouble.length > 0 && (
        <details>
          <summary>{trouble.length} {trouble.length === 1 ? "device is" : "devices are"} left out</summary>
          <ul class="plain">
            {trouble.slice(0, 200).map((row) => (
              <li key={row.device}><Badge state={row.state} text={row.text} /> <a href={`#/devices/${row.device}`}><Outside text={seats?.devices[row.device] ?? row.device} /></a> <Outside text={row.why} most={240} /></li>
            ))}
          </ul>
        </details>
      )}
    </Card>
  );
}

function isLate(seat: Seat, now: number, usual: number | undefined): boolean {
  const expected = Math.max(seat.usual ?? 0, usual ?? 0);
  return seat.state === "leased" && expected > 0 && now - seat.since > Math.max(AT_LEAST, LATE * expected);
}

function columns(seats: Seats, now: number, usual: number | undefined): readonly Column<Seat>[] {
  const lost = seats.seats.some((seat) => seat.lost.length > 0);
  const order = ["failed", "expired", "leased", "offered", "uploaded", "arrived"];
  const state = (seat: Seat): { state: string; text: string } =>
    isLate(seat, now, usual) ? { state: "late", text: "late" } : { state: seat.state, text: { leased: "training", offered: "invited", uploaded: "being checked", arrived: "done", expired: "lost it", failed: "gave up" }[seat.state] ?? seat.state };
  const took = (seat: Seat): number | undefined => (seat.state === "arrived" || seat.state === "uploaded" ? seat.seconds ?? undefined : seat.state === "leased" ? Math.max(0, now - seat.since) : undefined);
  return [
    { name: "Device", cell: (seat) => <a href={`#/devices/${seat.device}`}><Outside text={seats.devices[seat.device] ?? seat.device} most={40} /></a>, key: (seat) => seats.devices[seat.device] ?? seat.device },
    { name: "State", cell: (seat) => <Badge {...state(seat)} />, key: (seat) => order.indexOf(seat.state) },
    { name: "Trains from", cell: (seat) => <><Outside text={seat.boundary} most={40} /> <span class="quiet">{seats.boundaries[seat.boundary]?.length ?? "?"} of {seats.layers.length} layers</span></>, key: (seat) => seats.boundaries[seat.boundary]?.length ?? 0 },
    { name: "Time", cell: (seat) => duration(took(seat)), key: (seat) => took(seat) ?? 0, numeric: true, falling: true },
    ...(lost ? [{ name: "Instead of", cell: (seat: Seat) => (seat.lost.length === 0 ? <span class="quiet">–</span> : <Outside text={seat.lost.map((device) => seats.devices[device] ?? device).join(", ")} most={60} />) }] : []),
  ];
}
