// Binds requests, for front ends whose tensors are not read here, and for engines of others.
#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/checked_call.h"
#include "bindings/counts.h"
#include "bindings/plan.h"
#include "bindings/text.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

using Counts = std::vector<int64_t>;

/// Returns send_counts, sdispls, recv_counts, rdispls in elements; no receive counts if the peers announce them.
nb::tuple layout_of(const Request& request) {
    const std::vector<int64_t> all = request.in_elements();
    const auto size = static_cast<size_t>(request.size());
    nb::list lists;
    for (size_t i = 0; i < 4; ++i) {
        Counts values(all.begin() + static_cast<ptrdiff_t>(i * size),
                      all.begin() + static_cast<ptrdiff_t>((i + 1) * size));
        if (request.learns && i >= 2) values.clear();
        lists.append(values);
    }
    return nb::tuple(lists);
}

Request checked_request(int size, const Counts& shape, nb::handle send_counts, nb::handle recv_counts,
                        nb::handle sdispls, nb::handle rdispls, nb::handle unit, const std::optional<Counts>& out) {
    const Shape target = out ? Shape(*out) : Shape();
    return read_all_to_all_v(size, shape, send_counts, recv_counts, sdispls, rdispls, unit, out ? &target : nullptr);
}

using Region = std::pair<uintptr_t, size_t>;  // address of the first byte, bytes

ByteRange range_of(const Region& region) {
    return {region.first, region.second};
}

std::vector<ByteRange> ranges_of(const std::vector<Region>& regions) {
    std::vector<ByteRange> ranges;
    for (const Region& each : regions) ranges.push_back(range_of(each));
    return ranges;
}

void bind_argument_checks(nb::module_& m) {
    m.def("check_list", &check_list, "name"_a, "tensors"_a.none(), "size"_a,
          "Raises InvalidParamError unless this is a list of one tensor for each of `size` ranks.");
    m.def(
        "check_shape",
        [](const char* name, const Counts& shape, const Counts& expected) { check_shape(name, shape, expected); },
        "name"_a, "shape"_a, "expected"_a, "Raises InvalidTensorError for another shape.");
    m.def("check_count", &check_count, "name"_a, "count"_a, "expected"_a,
          "Raises InvalidTensorError for another number of elements.");
    m.def(
        "check_apart",
        [](const Region& output, const Region& input) { check_apart(range_of(output), range_of(input)); }, "output"_a,
        "input"_a, "Raises InvalidParamError if the two overlap; a region is an address and its bytes.");
    m.def(
        "check_same_or_apart",
        [](const Region& output, const Region& input) { check_same_or_apart(range_of(output), range_of(input)); },
        "output"_a, "input"_a, "As `check_apart`, but both may begin at one place.");
    m.def(
        "check_gather_apart",
        [](const Region& output, const Region& input, int rank) {
            check_gather_apart(range_of(output), range_of(input), rank);
        },
        "output"_a, "input"_a, "rank"_a, "As `check_apart`, but the input may be this rank's part of the output.");
    m.def(
        "check_lists_apart",
        [](const std::vector<Region>& outputs, const std::vector<Region>& inputs, const char* name) {
            for (const Region& output : outputs)
                for (const Region& input : inputs) check_apart(range_of(output), range_of(input));
            check_outputs_apart(ranges_of(outputs), name);
        },
        "outputs"_a, "inputs"_a, "name"_a = "output_tensor_list",
        "Raises InvalidParamError if an output overlaps an input or another output; `name`: of the outputs.");
    m.def(
        "check_own",
        [](const char* name, const std::vector<Region>& regions, const Region& own, const std::string& dtype,
           int rank) { check_own(name, ranges_of(regions), own.second, size_of(dtype_from_name(dtype)), rank); },
        "name"_a, "regions"_a, "own"_a, "dtype"_a, "rank"_a,
        "Raises InvalidTensorError unless the root's entry of its list is as long as its own tensor.");
    m.def(
        "check_part",
        [](const char* name, int64_t count, const char* others, int64_t others_count, int rank) {
            check_part(name, static_cast<size_t>(count), others, static_cast<size_t>(others_count), 1, rank);
        },
        "name"_a, "count"_a, "others"_a, "others_count"_a, "rank"_a,
        "Raises InvalidTensorError unless a tensor is as long as this rank's entry of the list `others`.");
    m.def(
        "check_signs", [](const char* name, const Counts& counts) { check_signs(name, counts); }, "name"_a, "counts"_a,
        "Raises InvalidParamError for a negative number.");
    m.def(
        "checked_least",
        [](const char* name, nb::handle value, int64_t least) {
            const std::optional<int64_t> number = integer_of(value);
            if (!number || *number < least) throw too_small(name, utf8(nb::repr(value)), least);
            return *number;
        },
        "name"_a, "value"_a.none(), "least"_a, "An integer of at least that; raises InvalidParamError for all else.");
    m.def(
        "checked_integer",
        [](const char* name, nb::handle value, int64_t first, int64_t last) {
            const std::optional<int64_t> number = integer_of(value);
            if (!number || *number < first || *number > last)
                throw invalid_param(1158, name, " is ", utf8(nb::repr(value)), ", expected an integer from ", first,
                                    " to ", last);
            return *number;
        },
        "name"_a, "value"_a.none(), "first"_a, "last"_a,
        "An integer in these bounds; raises InvalidParamError for all else.");
    m.def(
        "pack",
        [](const Counts& counts) {
            Counts displs(counts.size());
            pack(counts, displs);
            return displs;
        },
        "counts"_a, "The displacements of regions that follow each other in rank order.");
    m.def(
        "to_elements",
        [](Counts values, int64_t row) {
            to_elements(values, row);
            return values;
        },
        "values"_a, "row"_a, "Rows of `row` elements each, or displacements in them, as elements.");
}

}  // namespace

void bind_request(nb::module_& m) {
    bind_argument_checks(m);
    nb::class_<Request>(m, "Request", "What one rank's arguments ask of an exchange, checked.")
        .def_static("all_to_all_v", &checked_request, "size"_a, "shape"_a, "send_counts"_a.none(),
                    "recv_counts"_a.none() = nb::none(), "sdispls"_a.none() = nb::none(),
                    "rdispls"_a.none() = nb::none(), "unit"_a.none() = nb::none(), "out"_a.none() = nb::none(),
                    "size: the number of ranks; shape, out: of the input, and of the output if there is one.")
        .def_static(
            "all_to_all_single",
            [](int size, const Counts& output, const Counts& input, nb::handle output_split_sizes,
               nb::handle input_split_sizes, const std::optional<std::vector<std::string>>& names) {
                SplitNames argument_names;
                if (names && names->size() == 4) argument_names = {(*names)[0], (*names)[1], (*names)[2], (*names)[3]};
                return read_all_to_all_single(size, output, input, output_split_sizes, input_split_sizes,
                                              argument_names);
            },
            "size"_a, "output"_a, "input"_a, "output_split_sizes"_a.none(), "input_split_sizes"_a.none(),
            "names"_a = nb::none(), "output, input: shapes. names: of these four arguments, for errors.")
        .def_static(
            "all_gather",
            [](int size, const Counts& shape, std::optional<int64_t> numel_out, const std::string& name) {
                if (numel_out) check_gathered(name, *numel_out, shape, size);
                return gather_request(OpKind::all_gather, size, element_count(shape));
            },
            "size"_a, "shape"_a, "numel_out"_a.none() = nb::none(), "name"_a = "output",
            "shape: of the input; numel_out: of an output called `name`.")
        .def_static(
            "all_to_all_nd",
            [](const Counts& shape, const Counts& strides, size_t scatter, size_t gather, const Counts& scatter_sizes,
               const Counts& gather_sizes, int rank) {
                return swap_request({scatter, gather, scatter_sizes, gather_sizes}, rank, shape,
                                    strides.empty() ? contiguous_strides(shape) : strides);
            },
            "shape"_a, "strides"_a, "scatter"_a, "gather"_a, "scatter_sizes"_a, "gather_sizes"_a, "rank"_a,
            "Of checked arguments. strides: of the input, in elements; none for a contiguous one. None where what goes "
            "to a rank does not lie in rows at one distance.")
        .def_prop_ro(
            "layout", &layout_of,
            nb::for_getter(nb::sig("def layout(self, /) -> tuple[list[int], list[int], list[int], list[int]]")),
            "Send counts, displacements, receive counts, displacements, in elements.")
        .def_prop_ro(
            "buffer",
            [](const Request& self) {
                const std::vector<int64_t> all = self.in_elements();
                return nb::bytearray(reinterpret_cast<const char*>(all.data()), all.size() * sizeof(int64_t));
            },
            "The layout as int64 of shape [4, W].")
        .def_prop_ro(
            "shape", [](const Request& self) { return tuple_of(self.shape); },
            nb::for_getter(nb::sig("def shape(self, /) -> tuple[int, ...]")),
            "Of an output that is to be made; its first dimension is 0 where the peers announce the counts.")
        .def(
            "shape_for",
            [](const Request& self, const Counts& recv_counts) { return tuple_of(self.shape_for(recv_counts)); },
            "recv_counts"_a, nb::sig("def shape_for(self, recv_counts: Sequence[int]) -> tuple[int, ...]"),
            "The same for the counts, in elements, that the peers have announced.")
        .def_ro("has_gaps", &Request::has_gaps, "Whether the output has elements that no region covers.")
        .def_ro("terms", &Request::terms, "What the ranks compare besides.")
        .def_ro("learns", &Request::learns, "Whether the peers announce the receive counts.")
        .def_ro("row", &Request::row, "Elements of a unit of the caller's counts; 0 for rows that have none.")
        .def(
            "plan",
            [](const Request& self, CommunicatorPtr communicator, const std::string& op, const std::string& dtype) {
                Request named = self;
                named.op = op_from_name(op);
                return plan_of(std::move(communicator), std::move(named), dtype);
            },
            "communicator"_a, "op"_a, "dtype"_a, "Ready to run.");
    m.def(
        "in_rows",
        [](const Counts& box, const Counts& strides) -> std::optional<std::pair<int64_t, int64_t>> {
            const std::optional<Steps> steps = in_rows(box, strides);
            return steps ? std::optional(std::pair(steps->row, steps->stride)) : std::nullopt;
        },
        "box"_a, "strides"_a,
        "The length of the rows in which a box lies that has these strides, and the distance between them: zeros if it "
        "is in one piece, None if it is not in rows at one distance, in the order of its elements.");
    m.def(
        "read_counts",
        [](const char* name, nb::handle values, int size) {
            Counts counts(static_cast<size_t>(size));
            read_counts(name, values, counts);
            return counts;
        },
        "name"_a, "values"_a.none(), "size"_a,
        "`size` integers, one per rank, from a list, a tuple, an array or a tensor; signs are not checked.");
    m.def("reads_rows", &reads_rows, "unit"_a.none(), "dimensions"_a,
          "Whether counts count rows: 'row', 'element' or None, which means rows of 2 dimensions or more.");
    m.def(
        "row_size", [](const Counts& shape, const char* name) { return row_size(shape, name); }, "shape"_a,
        "name"_a = "input", "Elements of a row of dimension 0.");
    m.def("read_timeout", &read_timeout, "timeout"_a.none(), "Seconds above 0; negative for None.");
}

}  // namespace alltoallv
