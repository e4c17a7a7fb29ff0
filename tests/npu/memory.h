// Memory of the stand-in: counted, capped, and poisoned where nobody has written.
#pragma once
#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>

namespace standin {

constexpr int kDevices = 16, kOwners = 64;

struct Account {
  // reserved: what a caching allocator holds, so all that was ever live since the last empty_cache.
  int64_t live = 0, peak = 0, reserved = 0, reserved_peak = 0, cap = int64_t(4) << 30, allocations = 0;
  std::array<int64_t, kOwners> by_owner{}, by_owner_at_peak{};
};

Account account(int device);
void change_account(int device, void (*change)(Account&, int64_t), int64_t value = 0);

// Copies may still be under way from and to memory that is given back.
void before_free(const void* pointer, int64_t bytes);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// The device of this thread; bytes are owned by the process, because backward passes run in threads of torch's.
int current_device();
int device_count();
void set_device_count(int count);
int exchange_device(int device);
int exchange_owner(int owner);

}  // namespace standin
