// A client as Go's developers generate it: health, unary calls, streams to decoupled models, errors, keys.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	pb "client/inference"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

type client = pb.GRPCInferenceServiceClient

func connected(variable string) client {
	connection, err := grpc.Dial(os.Getenv(variable), grpc.WithInsecure())
	check(err)
	return pb.NewGRPCInferenceServiceClient(connection)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(found, expected interface{}) {
	if fmt.Sprint(found) != fmt.Sprint(expected) {
		panic(fmt.Sprintf("expected %v, got %v", expected, found))
	}
}

// A call for 30 seconds at most.
func limited() context.Context {
	deadline, _ := context.WithTimeout(context.Background(), 30*time.Second)
	return deadline
}

// A request with the input of the models in triton_models.py, raw.
func request(model, id string, shape []int64, values ...int32) *pb.ModelInferRequest {
	raw := make([]byte, 4*len(values))
	for index, value := range values {
		binary.LittleEndian.PutUint32(raw[4*index:], uint32(value))
	}
	return &pb.ModelInferRequest{
		ModelName:        model,
		Id:               id,
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT32", Shape: shape}},
		RawInputContents: [][]byte{raw},
	}
}

func numbers(response *pb.ModelInferResponse) []int32 {
	raw := response.RawOutputContents[0]
	values := make([]int32, len(raw)/4)
	for index := range values {
		values[index] = int32(binary.LittleEndian.Uint32(raw[4*index:]))
	}
	return values
}

func health(server client) {
	live, err := server.ServerLive(limited(), &pb.ServerLiveRequest{})
	check(err)
	expect(live.Live, true)
	ready, err := server.ModelReady(limited(), &pb.ModelReadyRequest{Name: "doubled"})
	check(err)
	expect(ready.Ready, true)
	config, err := server.ModelConfig(limited(), &pb.ModelConfigRequest{Name: "counted"})
	check(err)
	expect(config.Config.ModelTransactionPolicy.Decoupled, true)
	about, err := server.ModelMetadata(limited(), &pb.ModelMetadataRequest{Name: "doubled"})
	check(err)
	expect(about.Inputs[0].Shape, []int64{-1, 1})
}

func infer(server client) {
	response, err := server.ModelInfer(limited(), request("doubled", "7", []int64{2, 1}, 1, 2))
	check(err)
	expect(numbers(response), []int32{2, 4})
	expect(response.Id, "7")
	expect(response.Outputs[0].Shape, []int64{2, 1})
	response, err = server.ModelInfer(
		limited(), request("doubled", "", []int64{1, 1}, 4), grpc.UseCompressor(gzip.Name))
	check(err)
	expect(numbers(response), []int32{8})
	typed := request("doubled", "", []int64{1, 1})
	typed.RawInputContents = nil
	typed.Inputs[0].Contents = &pb.InferTensorContents{IntContents: []int32{5}}
	response, err = server.ModelInfer(limited(), typed)
	check(err)
	expect(numbers(response), []int32{10})
}

func stream_of_a_decoupled_model(server client) {
	stream, err := server.ModelStreamInfer(limited())
	check(err)
	wanted := request("counted", "a", []int64{1}, 3)
	wanted.Parameters = map[string]*pb.InferParameter{
		"triton_enable_empty_final_response": {ParameterChoice: &pb.InferParameter_BoolParam{BoolParam: true}},
	}
	check(stream.Send(wanted))
	for number := 0; number <= 3; number++ {
		message, err := stream.Recv()
		check(err)
		expect(message.ErrorMessage, "")
		response := message.InferResponse
		expect(response.Id, "a")
		isFinal := number == 3
		expect(response.Parameters["triton_final_response"].GetBoolParam(), isFinal)
		if isFinal {
			expect(len(response.Outputs), 0)
		} else {
			expect(numbers(response), []int{number})
		}
	}
	check(stream.Send(request("nope", "b", []int64{1}, 1)))
	message, err := stream.Recv()
	check(err)
	expect(strings.Contains(message.ErrorMessage, "nope"), true)
	expect(message.InferResponse.Id, "b")
	check(stream.CloseSend())
	_, err = stream.Recv()
	expect(err, io.EOF)
}

func cancelled_streams_free_the_model(server client) {
	for count := 0; count < 3; count++ {
		call, cancel := context.WithCancel(limited())
		stream, err := server.ModelStreamInfer(call)
		check(err)
		check(stream.Send(request("endless", "", []int64{1}, 0)))
		message, err := stream.Recv()
		check(err)
		expect(numbers(message.InferResponse), []int32{0})
		cancel()
		for err == nil {
			_, err = stream.Recv()
		}
		expect(status.Code(err), codes.Canceled)
	}
}

func errors(server client) {
	refused := func(code codes.Code, call context.Context, server client, model string, values ...int32) {
		_, err := server.ModelInfer(call, request(model, "", []int64{1, int64(len(values))}, values...))
		expect(status.Code(err), code)
	}
	refused(codes.NotFound, limited(), server, "nope", 1)
	refused(codes.InvalidArgument, limited(), server, "doubled", 1, 2)
	refused(codes.Internal, limited(), server, "doubled", -1)
	short, _ := context.WithTimeout(context.Background(), 200*time.Millisecond)
	refused(codes.DeadlineExceeded, short, server, "slow", 1000)
	keyed := connected("HEADWATER_KEYED_GRPC")
	refused(codes.Unauthenticated, limited(), keyed, "doubled", 1)
	call := metadata.AppendToOutgoingContext(limited(), "authorization", "Bearer "+os.Getenv("HEADWATER_KEY"))
	refused(codes.OK, call, keyed, "doubled", 1)
}

func run(name string, body func(client), server client) {
	var failure interface{}
	defer func() {
		if raised := recover(); raised != nil {
			failure = fmt.Sprint(raised)
		}
		line, _ := json.Marshal(map[string]interface{}{"error": failure})
		fmt.Printf("{\"case\":%q,%s\n", name, line[1:])
	}()
	body(server)
}

func main() {
	server := connected("HEADWATER_GRPC")
	run("health", health, server)
	run("infer", infer, server)
	run("stream_of_a_decoupled_model", stream_of_a_decoupled_model, server)
	run("cancelled_streams_free_the_model", cancelled_streams_free_the_model, server)
	run("errors", errors, server)
}
