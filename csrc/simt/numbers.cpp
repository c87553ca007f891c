// Conversions of 16-bit and 8-bit floats, by integer arithmetic and one table, and the product of two matrix fragments,
// laid out as in the PTX manual.
#include <array>
#include <cmath>
#include <cstring>

#include "machine.hpp"

namespace simt {

namespace {

// Return the value of a 16-bit float: sign, exponent with this bias, `mantissa` bits of fraction.
float value_of(uint32_t bits, int mantissa, int bias) {
    const uint32_t exponent_bits = 15 - mantissa, fraction = bits & ((1u << mantissa) - 1);
    const int exponent = static_cast<int>(bits >> mantissa & ((1u << exponent_bits) - 1));
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
    const int units = static_cast<int>(fraction) + (exponent ? 1 << mantissa : 0);
    return sign * std::ldexp(static_cast<float>(units), (exponent ? exponent : 1) - bias - mantissa);
}

using Table = std::array<float, 1 << 16>;

const Table& halves() {
    static const Table table = [] {
        Table t;
        for (uint32_t bits = 0; bits < t.size(); ++bits) t[bits] = value_of(bits, 10, 15);
        return t;
    }();
    return table;
}

}  // namespace

float to_float(uint16_t bits, bool half) {
    if (half) return halves()[bits];
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

uint16_t from_float(float x, bool half) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof x);
    const uint32_t sign = word >> 16 & 0x8000;
    if (x != x) return static_cast<uint16_t>(sign | (half ? 0x7e00 : 0x7fc0));
    if (!half) return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    const float magnitude = std::fabs(x);
    if (magnitude == 0.0f) return static_cast<uint16_t>(sign);
    if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    const int step = std::max(exponent - 11, -24);  // 2 ** step is the unit in the last place
    const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -step)));  // ties to even
    // A carry out of the mantissa correctly goes into the exponent.
    return static_cast<uint16_t>(sign | (units + (static_cast<uint32_t>(step + 24) << 10)));
}

float of_e4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15, fraction = byte & 7;
    if ((byte & 0x7f) == 0x7f) return NAN;
    const int units = static_cast<int>(fraction + (exponent ? 8 : 0));
    const float magnitude = std::ldexp(static_cast<float>(units), static_cast<int>(exponent ? exponent : 1) - 10);
    return byte >> 7 ? -magnitude : magnitude;
}

uint32_t nearest_byte(float x, bool e5m2) {
    if (x != x) return 0x7f;
    const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    const uint32_t largest = e5m2 ? 0x7b : 0x7e;
    const auto value = [&](uint32_t code) {
        const int exponent = static_cast<int>(code >> mantissa);
        const int fraction = static_cast<int>(code & ((1u << mantissa) - 1)) + (exponent ? 1 << mantissa : 0);
        return std::ldexp(static_cast<double>(fraction), (exponent ? exponent : 1) - bias - mantissa);
    };
    const double magnitude = std::fabs(static_cast<double>(x));
    uint32_t code = 0;
    while (code < largest && value(code + 1) <= magnitude) ++code;  // codes are ordered as their values are
    if (code < largest) {
        const double below = magnitude - value(code), above = value(code + 1) - magnitude;
        code += above < below || (above == below && code % 2 == 1);
    }
    return code | (std::signbit(x) ? 0x80u : 0u);
}

// Multiply fragments: D += A B. The lane number is 4 * group + place. A lane holds of A row group (and group + 8),
// columns 2 place and 2 place + 1 (and + 8); of B rows 2 place and 2 place + 1 (and + 8), column group; of D row group
// (and group + 8), columns 2 place and 2 place + 1.
void multiply_fragments(Operands* const (&lanes)[32]) {
    const bool half = lanes[0]->half;
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane / 4, place = lane % 4;
        const Operands& mine = *lanes[lane];
        for (int i = 0; i < 8; ++i) {
            const auto bits = static_cast<uint16_t>(mine.a[i / 2] >> 16 * (i % 2));
            a[group + 8 * (i / 2 % 2)][2 * place + i % 2 + 8 * (i / 4)] = to_float(bits, half);
        }
        for (int i = 0; i < 4; ++i) {
            const auto bits = static_cast<uint16_t>(mine.b[i / 2] >> 16 * (i % 2));
            b[2 * place + i % 2 + 8 * (i / 2)][group] = to_float(bits, half);
        }
    }
    float d[16][8] = {};
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) lanes[lane]->d[i] += d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
    }
}

}  // namespace simt
