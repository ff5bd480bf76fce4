// Rare lines for a person: warnings of the stall inspector, dropped connections. Not a trace.
#pragma once

#include <string_view>

namespace hvd {

enum class Level { kDebug, kInfo, kWarning, kError, kSilent };

// Writes "hvd: text\n" to standard error in one write, so lines of several ranks do not mix. Any thread.
void Log(Level level, std::string_view text);

// Lines below `level` are dropped; kWarning at start. Any thread.
void SetLogLevel(Level level);

// Sends lines to `sink` (without prefix and newline) instead of standard error; null restores standard error.
// `sink` may be called from any thread, also after it was replaced.
using LogSink = void (*)(Level level, std::string_view text);
void SetLogSink(LogSink sink);

}  // namespace hvd
