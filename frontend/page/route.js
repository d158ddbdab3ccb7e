// The way of an answer through the engines of a server that has several.

const REASONS = { turn: "its turn", load: "least load", session: "has the session", prefix: "has the prefix" };
const LEFT = { lost: " was lost, then ", moved: " ended, then " };

/** Return "engine 0 (its turn) was lost, then engine 1 (least load)"; "" where there was only one way. */
export function routeText({ engines, hops }) {
  const hasChoice = engines > 1 || hops.some(({ engine }) => engine !== hops[0].engine);
  if (!hasChoice && hops.length < 2) return "";
  return hops.map(({ engine, reason, left }, index) => {
    const why = hasChoice ? ` (${REASONS[reason] ?? reason})` : "";
    return `engine ${engine}${why}${index < hops.length - 1 ? LEFT[left] : ""}`;
  }).join("");
}
