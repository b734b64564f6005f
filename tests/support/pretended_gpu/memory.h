// Memory of pretended GPUs, pinned memory, and the copies between them that have been started.
//
// It also knows what is ordered: every stream, and every thread of the host, has a clock that says of each stream how
// much of its work it comes after. A stream that uses what another one has made, or memory that is freed while another
// stream than its own may use it, is a mistake that is told, as on a GPU it shows only now and then.

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pretended_gpu {

constexpr int kPoison = 0xFF;  // NaN, as a floating-point number
constexpr int kDevices = 4;
constexpr int kStreams = 32;  // of a device, beside its default one: torch gives them in turn, again and again

// A stream of any device: its own number from 1 on, or below 0 the device's default stream.
using Key = int64_t;

inline Key key(const c10::Stream& stream) {
  return stream.id() == 0 ? -1 - stream.device_index() : stream.id();
}

// By stream, how many pieces of its work are done before.
class Clock {
 public:
  uint64_t& operator[](Key stream) { return ticks_[stream + kDevices]; }
  void merge(const Clock& other) {
    for (size_t i = 0; i < ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

 private:
  std::array<uint64_t, kDevices + 1 + kDevices * kStreams> ticks_{};
};

inline Clock& host_clock() {
  static thread_local Clock clock;
  return clock;
}

// A copy that was started, and is made as late as its order allows.
struct Pending {
  uint64_t number;
  const char* source;
  char* target;
  size_t bytes;
  std::vector<char> taken;  // of the source, on the stream that computes: there the order is kept by itself
  Key reader;  // the stream that makes it
};

struct Block {
  size_t bytes;
  std::set<Key> used_by;  // as was told with record_stream
  int device = -1;  // of its memory; below 0: of the host's
  Key home = 0;  // the stream it was allocated on, which may have it again when it is freed; 0: of pinned memory
  std::map<Key, uint64_t> written, used;  // by stream, its last piece of work that wrote to it, or used it at all
};

class Memory {
 public:
  char* allocate(size_t bytes, bool pinned, int device = -1, Key home = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* start = static_cast<char*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64));
    TORCH_CHECK(start != nullptr, "out of memory");
    std::memset(start, kPoison, bytes);
    auto& block = (pinned ? pinned_ : blocks_)[start] = Block{bytes};
    block.home = home;
    block.device = device;
    if (!pinned) {
      block.written[home] = clocks_[home][home];  // whoever had that memory before may still use it there
      auto& use = uses_[device];
      use.most = std::max(use.most, use.now += bytes);
    }
    return start;
  }

  void free(char* start, bool pinned) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& blocks = pinned ? pinned_ : blocks_;
    auto found = blocks.find(start);
    if (!pinned) check_freed(found->second);
    if (awaited(*found, pinned)) {
      freed_.emplace(&blocks, start);
    } else {
      release(blocks, found);
    }
  }

  // The bytes of a device's memory that are allocated.
  size_t allocated(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return uses_[device].now;
  }

  // The most that were, since `forget_most`.
  size_t most_allocated(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return uses_[device].most;
  }

  void forget_most(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    uses_[device].most = uses_[device].now;
  }

  bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* at = static_cast<const char*>(data);
    auto after = pinned_.upper_bound(const_cast<char*>(at));
    if (after == pinned_.begin()) return false;
    --after;
    return at < after->first + std::max<size_t>(1, after->second.bytes);
  }

  void record(char* start, Key stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(start);
    if (found != blocks_.end()) found->second.used_by.insert(stream);
  }

  // A piece of a stream's work reads and writes these.
  void work(Key stream, const std::vector<const void*>& read, const std::vector<const void*>& written) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_locked(stream, read, written);
  }

  // A copy between a device and pinned memory.
  void start(Key stream, const char* source, char* target, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_locked(stream, {source}, {target});
    start_locked(stream, stream, source, target, bytes);
  }

  // A copy from device to device: as torch makes it, on the stream of the one that has the source, which first waits
  // for the other one's, and is waited for by that.
  void start_across(Key there, Key here, const char* source, char* target, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    clocks_[there].merge(clocks_[here]);
    work_locked(there, {source}, {target});
    clocks_[here].merge(clocks_[there]);
    if (here < 0) {
      finish_locked(there, number_);
      std::memcpy(target, source, bytes);
    } else {
      start_locked(here, there, source, target, bytes);
    }
  }

  Clock clock(Key stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return clocks_[stream];
  }

  // What a stream does from now on comes after all that.
  void come_after(Key stream, const Clock& before) {
    std::lock_guard<std::mutex> lock(mutex_);
    clocks_[stream].merge(before);
  }

  uint64_t newest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return number_;
  }

  bool is_done(Key stream, uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = pending_[stream];
    return queue.empty() || queue.front().number > number;
  }

  void finish(Key stream, uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    finish_locked(stream, number);
  }

 private:
  using Blocks = std::map<char*, Block>;

  Block* block_of(const void* data) {
    auto* at = const_cast<char*>(static_cast<const char*>(data));
    auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return nullptr;
    --after;
    return at < after->first + std::max<size_t>(1, after->second.bytes) ? &after->second : nullptr;
  }

  void work_locked(Key stream, const std::vector<const void*>& read, const std::vector<const void*>& written) {
    if (!mistake_.empty()) {
      auto told = std::exchange(mistake_, "");
      TORCH_CHECK(false, told);
    }
    auto& clock = clocks_[stream];
    clock.merge(host_clock());
    auto now = ++clock[stream];
    for (auto* all : {&read, &written}) {
      for (auto* data : *all) {
        auto* block = block_of(data);
        if (block == nullptr) continue;
        for (auto [other, tick] : block->written) {
          TORCH_CHECK(clock[other] >= tick, "a stream does not wait for what it uses, which another one makes");
        }
        block->used[stream] = now;
      }
    }
    for (auto* data : written) {
      if (auto* block = block_of(data)) block->written[stream] = now;
    }
  }

  // Memory that is freed goes back to its stream, which may use it for something else at once.
  void check_freed(const Block& block) {
    auto& home = clocks_[block.home];
    for (auto [stream, tick] : block.used) {
      auto known = std::max(home[stream], host_clock()[stream]);
      if (stream != block.home && !block.used_by.count(stream) && known < tick) {
        mistake_ = "memory is freed that another stream than its own may use, without record_stream";
      }
    }
  }

  void start_locked(Key stream, Key reader, const char* source, char* target, size_t bytes) {
    Pending copy{++number_, source, target, bytes, {}, reader};
    if (stream < 0) {
      finish_locked(stream, number_);
      copy.taken.assign(source, source + bytes);
    }
    std::memset(target, kPoison, bytes);
    pending_[stream].push_back(std::move(copy));
  }

  static void make(const Pending& copy) {
    std::memcpy(copy.target, copy.taken.empty() ? copy.source : copy.taken.data(), copy.bytes);
  }

  void finish_locked(Key stream, uint64_t number) {
    auto& queue = pending_[stream];
    while (!queue.empty() && queue.front().number <= number) {
      make(queue.front());
      queue.pop_front();
    }
    for (auto at = freed_.begin(); at != freed_.end();) {
      auto [blocks, start] = *at;
      auto found = blocks->find(start);
      if (awaited(*found, blocks == &pinned_)) {
        ++at;
      } else {
        release(*blocks, found);
        at = freed_.erase(at);
      }
    }
  }

  // Does a copy still need a block? Of pinned memory torch's allocators know it by themselves, of the device's they are
  // told with record_stream.
  bool awaited(const Blocks::value_type& block, bool pinned) {
    for (auto& [stream, queue] : pending_) {
      for (auto& copy : queue) {
        if (!pinned && !block.second.used_by.count(copy.reader)) continue;
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
    if (at->second.device >= 0) uses_[at->second.device].now -= at->second.bytes;
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

  struct Use {
    size_t now = 0, most = 0;
  };

  std::mutex mutex_;
  std::map<int, Use> uses_;  // by device
  Blocks blocks_, pinned_;
  std::set<std::pair<Blocks*, char*>> freed_;  // but a copy still needs them
  std::map<Key, std::deque<Pending>> pending_;
  std::map<Key, Clock> clocks_;
  std::string mistake_;  // to be told by the next piece of work
  uint64_t number_ = 0;
};

inline Memory& memory() {
  static auto* one = new Memory();
  return *one;
}

}  // namespace pretended_gpu
