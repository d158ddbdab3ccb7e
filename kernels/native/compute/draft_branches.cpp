#include "compute/draft_branches.h"

#include <algorithm>

namespace quire {

void DraftBranches::open(const StepRows& rows, KvCache& kv_cache, StepGather& gather,
                         std::map<std::int32_t, std::int32_t>& lookahead_rows) {
  const auto& [slots, starts, counts, num_drafts, branches] = rows;
  Sequences& sequences = kv_cache.sequences;
  const std::vector<std::int32_t> lookahead{0};  // any token: its row becomes the lookahead token's
  for (const auto& [index, given] : branches) {
    const auto i = static_cast<std::size_t>(index);
    const std::vector<std::int32_t>& tokens = given.empty() ? lookahead : given;
    const std::int64_t position = std::ssize(sequences.at(slots[i]).tokens) - num_drafts[i];
    const std::int64_t length = std::ssize(tokens);
    const std::int32_t slot = sequences.open_branch(slots[i], position, tokens);
    open_.push_back({index, slot});
    const bool is_forked = kv_cache.fork(slot, slots[i], starts[i], position + length);
    if (!is_forked || sequences.num_computed_tokens(slot) < starts[i]) {  // or it lacks the state
      sequences.close(slot);
      open_.pop_back();
      continue;
    }
    gather.add(static_cast<std::int32_t>(slots.size() + open_.size() - 1), slot, starts[i],
               position + length - starts[i], length);
    if (given.empty()) lookahead_rows[index] = gather.make_lookahead();
  }
}

void DraftBranches::take(const StepRows& rows, KvCache& kv_cache, std::vector<std::int32_t>& first_rows,
                         std::vector<ComputedSlot>& computed, StepResult& result) {
  const auto& slots = rows.slots;
  const auto find = [&](std::int32_t slot) { return std::ranges::find(computed, slot, &ComputedSlot::first); };
  for (std::size_t i = 0; i < open_.size(); i++) {
    const auto from = slots.size() + i, to = static_cast<std::size_t>(open_[i].index);
    const auto mine = find(slots[to]), others = find(open_[i].slot);
    if (mine != computed.end() && others != computed.end()) {
      if (result.token_ids[from].size() > result.token_ids[to].size()) {
        kv_cache.sequences.adopt(slots[to], open_[i].slot);
        const std::int64_t in_rows = rows.starts[to] + rows.counts[to];  // proposers observe no more
        mine->second = std::min(others->second, in_rows);
        std::swap(result.token_ids[to], result.token_ids[from]);
        std::swap(result.logprobs[to], result.logprobs[from]);
        first_rows[to] = first_rows[from];
      }
    }
    if (others != computed.end()) computed.erase(others);
    result.errors.erase(static_cast<std::int32_t>(from));
  }
  close(kv_cache.sequences);
  result.token_ids.resize(slots.size());
  result.logprobs.resize(slots.size());
  result.first_rows.assign(first_rows.begin(), first_rows.begin() + std::ssize(slots));
}

void DraftBranches::close(Sequences& sequences) {
  for (const OpenBranch& branch : open_) sequences.close(branch.slot);
  open_.clear();
}

}  // namespace quire
