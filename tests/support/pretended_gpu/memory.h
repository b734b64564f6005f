// Memory of pretended GPUs, pinned memory, and the copies between them that have been started.

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace pretended_gpu {

constexpr int kPoison = 0xFF;  // NaN, as a floating-point number

// A copy that was started, and is made as late as its order allows.
struct Pending {
  uint64_t number;
  const char* source;
  char* target;
  size_t bytes;
  std::vector<char> taken;  // of the source, on the stream that computes: there the order is kept by itself
};

struct Block {
  size_t bytes;
  bool freed = false;
  std::set<c10::StreamId> used_by;
};

class Memory {
 public:
  char* allocate(size_t bytes, bool pinned) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* start = static_cast<char*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64));
    TORCH_CHECK(start != nullptr, "out of memory");
    std::memset(start, kPoison, bytes);
    (pinned ? pinned_ : blocks_)[start] = Block{bytes};
    return start;
  }

  void free(char* start, bool pinned) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& blocks = pinned ? pinned_ : blocks_;
    auto found = blocks.find(start);
    found->second.freed = true;
    if (!awaited(*found, pinned)) release(blocks, found);
  }

  bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* at = static_cast<const char*>(data);
    auto after = pinned_.upper_bound(const_cast<char*>(at));
    if (after == pinned_.begin()) return false;
    --after;
    return at < after->first + std::max<size_t>(1, after->second.bytes);
  }

  void record(char* start, c10::StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(start);
    if (found != blocks_.end()) found->second.used_by.insert(stream);
  }

  void start(c10::StreamId stream, const char* source, char* target, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    Pending copy{++number_, source, target, bytes, {}};
    if (stream == 0) {
      finish_locked(stream, number_);
      copy.taken.assign(source, source + bytes);
    }
    std::memset(target, kPoison, bytes);
    pending_[stream].push_back(std::move(copy));
  }

  uint64_t newest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return number_;
  }

  bool is_done(c10::StreamId stream, uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = pending_[stream];
    return queue.empty() || queue.front().number > number;
  }

  void finish(c10::StreamId stream, uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    finish_locked(stream, number);
  }

 private:
  using Blocks = std::map<char*, Block>;

  static void make(const Pending& copy) {
    std::memcpy(copy.target, copy.taken.empty() ? copy.source : copy.taken.data(), copy.bytes);
  }

  void finish_locked(c10::StreamId stream, uint64_t number) {
    auto& queue = pending_[stream];
    while (!queue.empty() && queue.front().number <= number) {
      make(queue.front());
      queue.pop_front();
    }
    for (auto* blocks : {&blocks_, &pinned_}) {
      for (auto at = blocks->begin(); at != blocks->end();) {
        auto next = std::next(at);
        if (at->second.freed && !awaited(*at, blocks == &pinned_)) release(*blocks, at);
        at = next;
      }
    }
  }

  // Does a copy still need a block? Of pinned memory torch's allocators know it by themselves, of the device's they are
  // told with record_stream.
  bool awaited(const Blocks::value_type& block, bool pinned) {
    for (auto& [stream, queue] : pending_) {
      if (!pinned && !block.second.used_by.count(stream)) continue;
      for (auto& copy : queue) {
        for (const char* at : {copy.source, const_cast<const char*>(copy.target)}) {
          if (at >= block.first && at < block.first + block.second.bytes) return true;
        }
      }
    }
    return false;
  }

  // Freed memory is poisoned, and given back when no copy could write to it any more.
  void release(Blocks& blocks, Blocks::iterator at) {
    std::memset(at->first, kPoison, at->second.bytes);
    bool written = false;
    for (auto& [stream, queue] : pending_) {
      for (auto& copy : queue) {
        for (const char* p : {copy.source, const_cast<const char*>(copy.target)}) {
          written |= p >= at->first && p < at->first + at->second.bytes;
        }
      }
    }
    if (!written) std::free(at->first);  // else it is lost, with a wrong copy: the test shows it
    blocks.erase(at);
  }

  std::mutex mutex_;
  Blocks blocks_, pinned_;
  std::map<c10::StreamId, std::deque<Pending>> pending_;
  uint64_t number_ = 0;
};

inline Memory& memory() {
  static auto* one = new Memory();
  return *one;
}

}  // namespace pretended_gpu
